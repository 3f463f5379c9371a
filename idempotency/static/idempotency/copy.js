// Buttons that copy the text of another element. Without this script, or without a clipboard, they stay hidden.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
    if (!navigator.clipboard) {
        return;
    }
    for (const button of document.querySelectorAll("button[data-copy]")) {
        const label = button.textContent;
        button.hidden = false;
        button.addEventListener("click", async () => {
            try {
                await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
                button.textContent = button.dataset.done;
            } catch {
                button.textContent = button.dataset.failed;
            }
            setTimeout(() => { button.textContent = label; }, 3000);
        });
    }
});

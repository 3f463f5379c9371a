// Saved views that the person names: links to a list with its filters. The browser keeps them for each list.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
    const own = document.getElementById("idem-own-views");
    const form = document.getElementById("idem-save-view");
    if (!own || !form) return;
    const key = `idempotency:${location.pathname}`;

    const read = () => {
        try {
            return JSON.parse(localStorage.getItem(key)) ?? {};
        } catch {
            return {};
        }
    };
    const write = (views) => {
        localStorage.setItem(key, JSON.stringify(views));
        show();
    };

    const show = () => {
        own.replaceChildren(...Object.entries(read()).flatMap(([name, query]) => {
            const link = document.createElement("a");
            link.href = query;
            link.textContent = name;
            const remove = document.createElement("button");
            remove.type = "button";
            remove.className = "idem-copy";
            remove.textContent = own.dataset.sign;
            remove.setAttribute("aria-label", own.dataset.remove.replace("{name}", name));
            remove.addEventListener("click", () => {
                const {[name]: _, ...others} = read();
                write(others);
            });
            return [link, remove, " "];
        }));
    };

    const query = new URLSearchParams(location.search);
    query.delete("p");  // the number of the page
    form.hidden = query.size === 0;
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        write({...read(), [form.elements.view.value.trim()]: `?${query}`});
        form.reset();
    });
    show();
});

// Refreshes the region #idem-live from the URL of the page, unless the person has paused it.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const region = document.getElementById("idem-live");
  const bar = document.querySelector(".idem-live-bar");
  if (!region || !bar) return;
  const button = document.getElementById("idem-pause");
  const note = document.getElementById("idem-live-note");
  const seconds = Number(bar.dataset.seconds);
  let paused = false;

  const say = (text) => { if (note.textContent !== text) note.textContent = text; };

  // A refresh must not remove a form or dialog in use, or a selected text.
  const inUse = () =>
    document.hidden
    || region.querySelector("form:focus-within, dialog[open]") !== null
    || (!document.getSelection().isCollapsed && region.contains(document.getSelection().anchorNode));

  const place = (element) => element && (element.id ? `#${CSS.escape(element.id)}`
    : element.getAttribute("href") ? `a[href="${CSS.escape(element.getAttribute("href"))}"]` : "");

  const show = (fresh) => {
    const name = (details) => details.querySelector("summary").textContent;
    const open = new Set([...region.querySelectorAll("details[open]")].map(name));
    const focused = region.contains(document.activeElement) ? place(document.activeElement) : "";
    region.replaceChildren(...fresh.getElementById("idem-live").childNodes);
    document.getElementById("idem-as-of").replaceWith(fresh.getElementById("idem-as-of"));
    for (const details of region.querySelectorAll("details")) if (open.has(name(details))) details.open = true;
    if (focused) region.querySelector(focused)?.focus({preventScroll: true});
  };

  const refresh = async () => {
    if (paused || inUse()) return;
    try {
      // The server logs the look at the page once, not each refresh.
      const headers = {"Idempotency-Look": bar.dataset.look};
      const response = await fetch(location.href, {headers, signal: AbortSignal.timeout(30000)});
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      if (paused || inUse()) return;
      if (!fresh.getElementById("idem-live")) return say(bar.dataset.signedOut);
      show(fresh);
      say("");
    } catch {
      say(bar.dataset.unreachable);
    }
  };

  const again = () => setTimeout(() => refresh().finally(again), seconds * 1000);

  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? bar.dataset.resume : bar.dataset.pause;
    say(paused ? bar.dataset.paused : "");
    if (!paused) refresh();
  });
  again();
});

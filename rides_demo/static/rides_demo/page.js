// The page of a signed-in rider: the form, the switches, and the return from the admin.

import { press, presses, watch } from "./booking.js";
import { updateCsrfToken } from "./switches.js";

document.getElementById("booking").addEventListener("submit", (event) => {
  event.preventDefault();
  press();
});

// Update the page when the visitor returns from the admin.
window.addEventListener("focus", () => {
  if (presses.all) watch();
});

document.addEventListener("submit", (event) => updateCsrfToken(event.target));

// The page disables these elements until this script has loaded.
for (const held of document.querySelectorAll("main :disabled")) held.disabled = false;

// Submits the form on the progress page of an action. Without JavaScript, the person presses its button.
"use strict";
const work = document.querySelector("form[data-idem-continue]");
if (work) {
  const timer = setTimeout(() => work.requestSubmit(work.querySelector("button[value=continue]")), Number(work.dataset.idemContinue));
  // The form must not replace the page that a person has chosen and that is still loading.
  document.addEventListener("click", (event) => event.target.closest("a, button") && clearTimeout(timer));
}

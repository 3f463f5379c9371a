// Submits the form on the progress page of an action. Without JavaScript, the person presses its button.
"use strict";
const work = document.querySelector("form[data-idem-continue]");
if (work) {
  setTimeout(() => work.requestSubmit(work.querySelector("button[value=continue]")), Number(work.dataset.idemContinue));
}

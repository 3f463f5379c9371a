// Submits the form on the progress page of an action. Without JavaScript, the person presses its button.
"use strict";
document.querySelector("form[data-idem-continue]")?.requestSubmit();

// Presses the button of a page that shows the progress of an action. Without scripts a person presses it.
"use strict";
document.querySelector("form[data-idem-continue]")?.requestSubmit();

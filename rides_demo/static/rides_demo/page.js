// The booking, sent until it has an answer that stands, always with the same key; and what the server knows of it meanwhile.
"use strict";

const MOST_TRIES = 30;
const LONGEST_PAUSE_SECONDS = 3;
const POLL_SECONDS = 0.5;
// The receipt is another process's work, which a visitor waits for so long.
const MOST_POLLS_AFTER_THE_ANSWER = 40;
const SHOWN_LINES = 8;

const form = document.getElementById("booking");
const outcome = document.getElementById("outcome");
const heard = [];
const presses = { all: 0, open: 0 };
let sent = 0;
let watching = false;
// The last press ended without an answer that stands; the completer or a person may settle it yet.
let unsettled = false;

const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

function say(text, tone = "") {
  outcome.dataset.tone = tone;
  // A status that is said again would be read out again.
  if (outcome.textContent !== text) outcome.textContent = text;
}

function show(id, text) {
  const element = document.getElementById(id);
  if (element) element.textContent = text;
}

function list(id, lines) {
  const items = lines.slice(-SHOWN_LINES).map(([at, strong, text]) => {
    const item = document.createElement("li");
    const time = document.createElement("time");
    const first = document.createElement("strong");
    time.textContent = at.toLocaleTimeString();
    first.textContent = strong;
    item.append(time, " ", first, " ", text);
    return item;
  });
  if (lines.length > SHOWN_LINES) {
    const more = document.createElement("li");
    more.className = "quiet";
    more.textContent = `${lines.length - SHOWN_LINES} earlier`;
    items.unshift(more);
  }
  document.getElementById(id).replaceChildren(...items);
}

function hear(press, attempt, strong, text) {
  heard.push([new Date(), strong, `${text} (press ${press}, try ${attempt})`]);
  list("heard", heard);
}

// Sends once. Returns whether the answer stands, what it says, and how many seconds to wait before the next try.
async function send(request, press, attempt) {
  sent += 1;
  show("sent", sent);
  let response, answer;
  try {
    response = await fetch(form.action, request);
    answer = await response.json();
  } catch (error) {
    // Whether it ran is not known, which is what the key is for.
    hear(press, attempt, "no answer", "the connection was lost");
    return { stands: false, text: "No answer from Rocket Rides." };
  }
  const text = answer.message || (answer.error && answer.error.message) || answer.title || response.statusText;
  const replayed = response.headers.get("Idempotent-Replayed") === "true";
  hear(press, attempt, response.status, replayed ? `${text} The stored answer, replayed.` : text);
  const later = response.headers.get("Retry-After");
  if (response.status >= 500 || (response.status === 409 && later)) {
    return { stands: false, text: `${response.status}: ${text.split(". ")[0].replace(/\.$/, "")}.`, pause: Number(later) };
  }
  return { stands: true, text, tone: response.ok ? "good" : "bad", stuck: answer.code === "key_stuck" };
}

async function book(request, press) {
  for (let attempt = 1; attempt <= MOST_TRIES; attempt += 1) {
    const result = await send(request, press, attempt);
    if (result.stands) {
      unsettled = result.stuck;
      say(result.stuck ? "This booking is stuck: it waits for a person. Open its key in the admin." : result.text, result.tone);
      return;
    }
    // The other presses of the button may be ahead of this one.
    if (outcome.dataset.tone !== "good") say(`${result.text} Trying again with the same key …`, "warn");
    await wait(Math.min(result.pause || attempt, LONGEST_PAUSE_SECONDS));
  }
  unsettled = true;
  say("No answer that stands. Press the button to try again: it is still one booking.", "warn");
}

const LABELS = { running: "at work", waiting: "waits for a retry", stuck: "stuck", done: "done", todo: "" };

function showBooking(booking) {
  const steps = [...document.querySelectorAll("#steps li")];
  const reached = steps.findIndex((step) => step.dataset.point === booking.recovery_point);
  steps.forEach((step, index) => {
    const state = index <= reached ? "done" : index === reached + 1 ? booking.state : "todo";
    step.dataset.state = state;
    step.querySelector("em").textContent = LABELS[state] || "";
    if (index === reached) step.setAttribute("aria-current", "step");
    else step.removeAttribute("aria-current");
  });
  show("count-rides", booking.rides);
  show("count-charges", booking.charges === null ? "?" : booking.charges);
  show("count-receipts", booking.receipts);
  list("history", booking.history.map(({ at, event, detail }) => [new Date(at), event, event === "claimed" ? `by the ${detail}` : detail]));
  const link = document.getElementById("admin-link");
  link.firstElementChild.href = booking.admin;
  link.hidden = false;
}

const isOver = (booking) => booking.state === "stuck" || (booking.state === "finished" && (booking.response_code !== 201 || booking.receipts > 0));

// Follows the booking until it is over, and then shows the rides as they are.
async function watch(key) {
  if (watching) return;
  watching = true;
  let idle = 0;
  let over = false;
  while ((!over || presses.open) && idle < MOST_POLLS_AFTER_THE_ANSWER) {
    await wait(POLL_SECONDS);
    try {
      const response = await fetch(`${form.dataset.state}?${new URLSearchParams({ key })}`);
      const { booking } = await response.json();
      if (booking) showBooking(booking);
      over = Boolean(booking) && isOver(booking);
      if (unsettled && !presses.open && booking && booking.state === "finished") {
        unsettled = false;
        say("Finished in the meantime. Press the button again for the answer.", "good");
      }
    } catch (error) {
      // The next one may come through.
    }
    idle = presses.open ? 0 : idle + 1;
  }
  watching = false;
  await showRides();
}

async function showRides() {
  try {
    const page = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
    const rides = page.getElementById("rides");
    if (rides) document.getElementById("rides").replaceWith(document.adoptNode(rides));
  } catch (error) {
    // What is shown is older, not wrong.
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const data = new FormData(form);
  // The key stays with the form: a second click books nothing more, however late it comes.
  const key = data.get("idempotency_key");
  data.delete("idempotency_key");
  const request = {
    method: "POST",
    headers: { "Authorization": `Bearer ${form.dataset.token}`, "Idempotency-Key": key },
    body: new URLSearchParams(data),
  };
  presses.all += 1;
  presses.open += 1;
  if (presses.open === 1) say("Booking …", "");
  watch(key);
  await book(request, presses.all);
  presses.open -= 1;
});

// Whoever comes back from the admin sees what was done there.
window.addEventListener("focus", () => {
  if (presses.all) watch(form.elements.idempotency_key.value);
});

// Signing in to the admin, in another tab, gives the browser another token than the forms here were made with.
function freshen(posted) {
  const cookie = document.cookie.split("; ").find((one) => one.startsWith("csrftoken="));
  const field = posted.elements.csrfmiddlewaretoken;
  if (cookie && field) field.value = cookie.slice("csrftoken=".length);
}
document.addEventListener("submit", (event) => freshen(event.target));

const stripe = document.getElementById("stripe");
if (stripe) {
  stripe.addEventListener("submit", (event) => event.preventDefault());
  stripe.addEventListener("change", async () => {
    const chosen = stripe.querySelector(":checked");
    let text = "The switch could not be moved. Is the sandbox running? Try again after a reload.";
    freshen(stripe);
    try {
      const response = await fetch(stripe.action, { method: "POST", body: new FormData(stripe) });
      if (response.ok) text = `Stripe ${chosen.labels[0].textContent.toLowerCase()} now.`;
    } catch (error) {
      // The text says it.
    }
    show("stripe-outcome", text);
  });
}

// The page holds these back until somebody listens to them.
for (const held of document.querySelectorAll("main :disabled")) held.disabled = false;

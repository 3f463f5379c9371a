// Sends the booking with one key until a final response arrives, and shows its state on the server.
"use strict";

const MAX_ATTEMPTS = 30;
const MAX_PAUSE_SECONDS = 3;
const POLL_SECONDS = 0.5;
// The worker creates the receipt after the response; the page waits for it this long.
const MAX_IDLE_POLLS = 40;
const MAX_LINES = 8;

const form = document.getElementById("booking");
const outcome = document.getElementById("outcome");
const responses = [];
const presses = { all: 0, open: 0 };
let sent = 0;
let watching = false;
// The last press ended without a final response; the completer or an operator may still finish the booking.
let unsettled = false;

const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

function setStatus(text, tone = "") {
  outcome.dataset.tone = tone;
  // Setting an equal text would make screen readers repeat it.
  if (outcome.textContent !== text) outcome.textContent = text;
}

function show(id, text) {
  const element = document.getElementById(id);
  if (element) element.textContent = text;
}

function list(id, lines) {
  const items = lines.slice(-MAX_LINES).map(([at, strong, text]) => {
    const item = document.createElement("li");
    const time = document.createElement("time");
    const first = document.createElement("strong");
    time.textContent = at.toLocaleTimeString();
    first.textContent = strong;
    item.append(time, " ", first, " ", text);
    return item;
  });
  if (lines.length > MAX_LINES) {
    const more = document.createElement("li");
    more.className = "quiet";
    more.textContent = `${lines.length - MAX_LINES} earlier`;
    items.unshift(more);
  }
  document.getElementById(id).replaceChildren(...items);
}

function addResponse(press, attempt, strong, text) {
  responses.push([new Date(), strong, `${text} (press ${press}, attempt ${attempt})`]);
  list("responses", responses);
}

// Sends one request. Returns whether the response is final, its text, and the seconds before the next attempt.
async function send(request, press, attempt) {
  sent += 1;
  show("sent", sent);
  let response, answer;
  try {
    response = await fetch(form.action, request);
    answer = await response.json();
  } catch (error) {
    // The request may have run. The key makes the retry safe.
    addResponse(press, attempt, "no response", "the connection was lost");
    return { final: false, text: "No response from Rocket Rides." };
  }
  const text = answer.message || (answer.error && answer.error.message) || answer.title || response.statusText;
  const replayed = response.headers.get("Idempotent-Replayed") === "true";
  addResponse(press, attempt, response.status, replayed ? `${text} Replay of the stored response.` : text);
  const later = response.headers.get("Retry-After");
  if (response.status >= 500 || (response.status === 409 && later)) {
    return { final: false, text: `${response.status}: ${text.split(". ")[0].replace(/\.$/, "")}.`, pause: Number(later) };
  }
  return { final: true, text, tone: response.ok ? "good" : "bad", stuck: answer.code === "key_stuck" };
}

async function book(request, press) {
  for (let attempt = 1; attempt <= MAX_ATTEMPTS; attempt += 1) {
    const result = await send(request, press, attempt);
    if (result.final) {
      unsettled = result.stuck;
      setStatus(result.stuck ? "This booking is stuck and needs manual review. Open its key in the admin." : result.text, result.tone);
      return;
    }
    // Another press of the button may already have succeeded.
    if (outcome.dataset.tone !== "good") setStatus(`${result.text} Trying again with the same key …`, "warn");
    await wait(Math.min(result.pause || attempt, MAX_PAUSE_SECONDS));
  }
  unsettled = true;
  setStatus("No final response. Press the button to retry: it is still one booking.", "warn");
}

const LABELS = { running: "running", waiting: "waiting for a retry", stuck: "stuck", done: "done", todo: "" };

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

// Polls the booking until it is finished or stuck, then updates the list of rides.
async function watch(key) {
  if (watching) return;
  watching = true;
  let idle = 0;
  let over = false;
  while ((!over || presses.open) && idle < MAX_IDLE_POLLS) {
    await wait(POLL_SECONDS);
    try {
      const response = await fetch(`${form.dataset.state}?${new URLSearchParams({ key })}`);
      const { booking } = await response.json();
      if (booking) showBooking(booking);
      over = Boolean(booking) && isOver(booking);
      if (unsettled && !presses.open && booking && booking.state === "finished") {
        unsettled = false;
        setStatus("The booking is finished. Press the button again for its response.", "good");
      }
    } catch (error) {
      // The next poll may succeed.
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
    // The list stays as it was.
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const data = new FormData(form);
  // The form keeps its key, so a second click repeats the booking and books nothing new.
  const key = data.get("idempotency_key");
  data.delete("idempotency_key");
  const request = {
    method: "POST",
    headers: { "Authorization": `Bearer ${form.dataset.token}`, "Idempotency-Key": key },
    body: new URLSearchParams(data),
  };
  presses.all += 1;
  presses.open += 1;
  if (presses.open === 1) setStatus("Booking …", "");
  watch(key);
  await book(request, presses.all);
  presses.open -= 1;
});

// Update the page when the visitor returns from the admin.
window.addEventListener("focus", () => {
  if (presses.all) watch(form.elements.idempotency_key.value);
});

// A login to the admin in another tab changes the CSRF token, so update the token of the forms.
function updateCsrfToken(posted) {
  const cookie = document.cookie.split("; ").find((one) => one.startsWith("csrftoken="));
  const field = posted.elements.csrfmiddlewaretoken;
  if (cookie && field) field.value = cookie.slice("csrftoken=".length);
}
document.addEventListener("submit", (event) => updateCsrfToken(event.target));

const stripe = document.getElementById("stripe");
if (stripe) {
  stripe.addEventListener("submit", (event) => event.preventDefault());
  stripe.addEventListener("change", async () => {
    const chosen = stripe.querySelector(":checked");
    let text = "The behaviour could not be set. Check that the sandbox is running, then reload the page.";
    updateCsrfToken(stripe);
    try {
      const response = await fetch(stripe.action, { method: "POST", body: new FormData(stripe) });
      if (response.ok) text = `Stripe ${chosen.labels[0].textContent.toLowerCase()} now.`;
    } catch (error) {
      // The text reports the failure.
    }
    show("stripe-outcome", text);
  });
}

// The page disables these elements until this script has loaded.
for (const held of document.querySelectorAll("main :disabled")) held.disabled = false;

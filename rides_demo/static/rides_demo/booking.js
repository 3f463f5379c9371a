// Sends the booking with one key until a final response arrives, and polls its state on the server.

import { addLine, clear, countRequest, setStatus, setText, showBooking, shown, statusTone } from "./story.js";

const MAX_PAUSE_SECONDS = 3;
const POLL_SECONDS = 0.5;
// The worker creates the receipt after the response; the page waits for it this long.
const MAX_IDLE_POLLS = 40;

const form = document.getElementById("booking");
export const presses = { all: 0, open: 0 };
let watching = false;
// The last press ended without a final response; the completer or an operator may still finish the booking.
let unsettled = false;
// A final response to this key has arrived.
let answered = false;

export const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));
export const keyOf = () => form.elements.idempotency_key.value;

// Gives the form a new key: the next press books another ride.
export function renew() {
  form.elements.idempotency_key.value = crypto.randomUUID();
  setText("key", keyOf());
  presses.all = 0;
  unsettled = answered = false;
  clear();
}

// Sends one request. Returns whether the response is final, its text, and the seconds before the next attempt.
async function send(request) {
  countRequest();
  let response, answer;
  try {
    response = await fetch(form.action, request);
    answer = await response.json();
  } catch (error) {
    // The request may have run. The key makes the retry safe.
    addLine("browser", "no response", "The connection was lost. Was the card charged? The browser cannot know.", "bad");
    return { final: false, text: "The connection was lost." };
  }
  const text = answer.message || (answer.error && answer.error.message) || answer.title || response.statusText;
  const replayed = response.headers.get("Idempotent-Replayed") === "true";
  const later = response.headers.get("Retry-After");
  const final = !(response.status >= 500 || (response.status === 409 && later));
  addLine("browser", response.status, replayed ? `${text} Replay of the stored response.` : text, !final ? "warn" : response.ok ? "good" : "bad");
  if (final) return { final, replayed, text, tone: response.ok ? "good" : "bad", stuck: answer.code === "key_stuck" };
  return { final, text: `${response.status}: ${text.split(". ")[0].replace(/\.$/, "")}.`, pause: Number(later) };
}

// Retries until a response is final, for longer than the lock of a dead run and the completer's delay.
async function book(request) {
  const end = Date.now() + Number(form.dataset.patience) * 1000;
  for (let attempt = 1; Date.now() < end; attempt += 1) {
    const result = await send(request);
    if (result.final) {
      unsettled = result.stuck;
      const text = answered && result.replayed ? `${result.text} Same answer, replayed: nothing was booked.` : result.text;
      answered = !result.stuck;
      setStatus(result.stuck ? "This booking is stuck and needs manual review. Open its key in the admin." : text, result.tone);
      return;
    }
    // Another press of the button may already have succeeded.
    if (statusTone() !== "good") setStatus(`${result.text} Trying again with the same key …`, "warn");
    const pause = result.pause || Math.min(attempt, MAX_PAUSE_SECONDS);
    // Clients that failed together do not return together.
    await wait(pause * (1 + Math.random() / 4));
  }
  unsettled = true;
  setStatus("No final response. Press the button to retry: it is still one booking.", "warn");
}

// Books with the key of the form; a second press repeats the booking and books nothing new.
export async function press() {
  const data = new FormData(form);
  const key = data.get("idempotency_key");
  data.delete("idempotency_key");
  for (const place of ["origin", "target"]) {
    const [latitude, longitude] = data.get(place).split(",");
    data.delete(place);
    data.set(`${place}_lat`, latitude);
    data.set(`${place}_lon`, longitude);
  }
  const request = {
    method: "POST",
    headers: { "Authorization": `Bearer ${form.dataset.token}`, "Idempotency-Key": key },
    body: new URLSearchParams(data),
  };
  presses.all += 1;
  presses.open += 1;
  addLine("you", "Book", presses.all === 1 ? "You pressed the button." : "You pressed it again: the same key.");
  if (presses.open === 1) setStatus("Booking …");
  watch();
  await book(request);
  presses.open -= 1;
}

const get = async (url) => (await fetch(`${url}?${new URLSearchParams({ key: keyOf() })}`)).json();

// Asks the server for the booking and shows it; throws an error if there is no response.
export async function refresh() {
  const key = keyOf();
  const [{ booking }, { charges }] = await Promise.all([
    get(form.dataset.state), form.dataset.charges ? get(form.dataset.charges) : { charges: null },
  ]);
  if (booking && key === keyOf()) showBooking({ ...booking, charges });
}

const isOver = () => Boolean(shown) && (shown.state === "stuck" || (shown.state === "finished" && (shown.response_code !== 201 || shown.receipts > 0)));

// Polls the booking until it is finished or stuck, then updates the list of rides.
export async function watch() {
  if (watching) return;
  watching = true;
  let idle = 0;
  // What the page shows may be old: an operator may have finished a stuck booking.
  let over = false;
  while ((!over || presses.open) && idle < MAX_IDLE_POLLS) {
    await wait(POLL_SECONDS);
    try {
      await refresh();
      over = isOver();
      if (unsettled && !presses.open && shown && shown.state === "finished") {
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

// The switches of the demo: the behaviour of Stripe, and the button that kills the web worker.

import { keyOf, press, presses, refresh, renew, wait } from "./booking.js";
import { noteKill, setText, shown } from "./story.js";

const POLL_SECONDS = 0.2;
const NARROW = window.matchMedia("(max-width: 56rem)");

const stripe = document.getElementById("stripe");
const kill = document.getElementById("kill");

// A login to the admin in another tab changes the CSRF token, so update the token of the forms.
export function updateCsrfToken(posted) {
  const cookie = document.cookie.split("; ").find((one) => one.startsWith("csrftoken="));
  const field = posted.elements.csrfmiddlewaretoken;
  if (cookie && field) field.value = cookie.slice("csrftoken=".length);
}

// Sends the chosen behaviour, and again while no answer comes: the worker that has just been killed may get the request.
async function sendBehaviour() {
  for (let left = 20; ; left -= 1) {
    try {
      return await fetch(stripe.action, { method: "POST", body: new FormData(stripe) });
    } catch (error) {
      if (!left) throw error;
      await wait(POLL_SECONDS);
    }
  }
}

// Sets the chosen behaviour, or the one with the given name.
async function setBehaviour(name) {
  if (name) stripe.elements.behaviour.value = name;
  const chosen = stripe.querySelector(":checked");
  let text = "The behaviour could not be set. Check that the sandbox is running, then reload the page.";
  updateCsrfToken(stripe);
  try {
    const response = await sendBehaviour();
    if (response.ok) text = `Stripe ${chosen.labels[0].textContent.toLowerCase()} now.`;
  } catch (error) {
    // The text reports the failure.
  }
  setText("stripe-outcome", text);
}

// Books with a slow Stripe, until the card is charged and the response is on its way. Returns whether the booking still runs.
async function reachWorstMoment() {
  if (shown && ["finished", "stuck"].includes(shown.state)) renew();
  if (stripe) await setBehaviour("slow");
  setText("kill-outcome", "Waiting until Stripe has charged the card …");
  press();
  while (presses.open) {
    await refresh().catch(() => null);
    if (shown && shown.state === "running" && (shown.charges || !stripe)) return true;
    await wait(POLL_SECONDS);
  }
  return false;
}

async function playScene() {
  const before = stripe && stripe.elements.behaviour.value;
  document.getElementById("watch").scrollIntoView({ behavior: "smooth", block: NARROW.matches ? "start" : "nearest" });
  const running = await reachWorstMoment();
  const outcome = running ? await killWorker() : "The booking ended before its card was charged, so nothing was killed.";
  setText("kill-outcome", outcome);
  if (stripe && stripe.elements.behaviour.value === "slow") await setBehaviour(before);
  return outcome;
}

async function killWorker() {
  updateCsrfToken(kill);
  const posted = new FormData(kill);
  posted.set("key", keyOf());
  try {
    const response = await fetch(kill.action, { method: "POST", body: posted });
    const answer = await response.json();
    if (!response.ok) return answer.error || "Nothing was killed.";
    if (!answer.ran_booking) return `Process ${answer.pid} was killed. It did not run this booking.`;
    noteKill(answer.pid);
    return `Process ${answer.pid}, which ran your request, is dead. Watch the booking.`;
  } catch (error) {
    return "The server did not respond. Press the button again.";
  }
}

if (stripe) {
  stripe.addEventListener("submit", (event) => event.preventDefault());
  stripe.addEventListener("change", () => setBehaviour());
}

if (kill) {
  const button = kill.querySelector("button");
  kill.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    setText("kill-outcome", await (presses.open ? killWorker() : playScene()));
    button.disabled = false;
  });
}

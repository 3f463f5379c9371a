// Shows the booking: its steps on the server, and the story of what the visitor, the browser and the server did.

const MAX_LINES = 24;
const STEP_LABELS = { running: "running", waiting: "waiting for a retry", stuck: "stuck", skipped: "skipped", killed: "process killed before this was recorded" };

const outcome = document.getElementById("outcome");
const story = document.getElementById("story");
const lesson = document.getElementById("lesson");
// The lines of the visitor and the browser; those of the server are the history of the key.
let lines = [];
let sent = 0;
// The number of the run whose process the visitor killed.
let killedRun = 0;
// The booking as the server described it last, null before the first time.
export let shown = null;

const numberOf = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

export function setText(id, text) {
  const element = document.getElementById(id);
  // Setting an equal text would make screen readers repeat it.
  if (element && element.textContent !== text) element.textContent = text;
}

export function setStatus(text, tone = "") {
  outcome.dataset.tone = tone;
  setText("outcome", text);
}

export const statusTone = () => outcome.dataset.tone;

export function countRequest() {
  sent += 1;
  setText("sent", String(sent));
}

// Adds what the visitor or the browser did; an equal line is counted.
export function addLine(who, strong, text, tone = "") {
  const last = lines.at(-1);
  if (last && last.who === who && last.strong === strong && last.text === text) last.times += 1;
  else lines.push({ at: new Date(), who, strong, text, tone, times: 1 });
  showStory();
}

export function noteKill(pid) {
  killedRun = shown ? shown.runs : 0;
  addLine("you", "kill -9", `You killed process ${pid} while it ran your request.`, "bad");
  if (shown) showBooking(shown);
}

export function clear() {
  lines = [];
  sent = killedRun = 0;
  shown = null;
  lesson.hidden = document.getElementById("admin-link").hidden = true;
  for (const id of ["sent", "count-rides", "count-charges", "count-receipts"]) setText(id, "0");
  for (const step of document.querySelectorAll("#steps li")) setStep(step, "todo");
  setText("state", "No booking yet.");
  setStatus("Nothing sent yet.");
  showStory();
}

function showStory() {
  const all = [...lines, ...(shown ? serverLines(shown) : [])].sort((one, other) => one.at - other.at);
  const items = all.slice(-MAX_LINES).map(({ at, who, strong, text, tone, times = 1 }) => {
    const item = document.createElement("li");
    const parts = { time: `${((at - all[0].at) / 1000).toFixed(1)} s`, b: who, span: "" };
    for (const [tag, content] of Object.entries(parts)) item.append(Object.assign(document.createElement(tag), { textContent: content }));
    item.children[1].className = "who";
    const first = Object.assign(document.createElement("strong"), { textContent: strong });
    item.lastChild.append(first, ` ${text}`, times > 1 ? ` (${times} times)` : "");
    if (tone) item.dataset.tone = tone;
    return item;
  });
  story.replaceChildren(...items);
}

const WHO = { client: "the request of your browser", completer: "the completer", reaper: "the reaper" };

// Explains the history of the key, which has only the last events: the row has the number of all runs, and the points.
function serverLines({ history, runs: all, steps }) {
  let runs = all - history.filter(({ event }) => event === "claimed").length;
  // An earlier run has called Stripe.
  let calls = runs;
  const told = new Set(history.filter(({ event }) => event === "recovery point").map(({ detail }) => detail));
  let point = Object.keys(steps).filter((name) => steps[name] === "done" && name !== "finished" && !told.has(name)).at(-1);
  const explained = ({ event, detail }) => {
    switch (event) {
      case "claimed":
        runs += 1;
        return [`run ${runs}`, runs === 1 ? `starts, for ${WHO[detail] || detail}. It locks the key for ${story.dataset.lock} seconds.`
          : `takes the lock, for ${WHO[detail] || detail}, and continues from ${point}.`];
      case "recovery point":
        point = detail;
        return [detail, "is committed."];
      case "call begun":
        calls += 1;
        return [`call ${detail}`, calls === 1 ? "Stripe is called, with a key that is derived from yours."
          : "Stripe is called again, with the same key. It returns the charge that it has made, if there is one."];
      case "run lost":
        return [`run ${runs} is lost`, `It never ended, and its lock has expired.`, "bad"];
      case "finished":
        return ["finished", `The response is stored: ${detail}.`, "good"];
      default:
        return [event, detail, "warn"];
    }
  };
  return history.map((event) => {
    const [strong, text, tone] = explained(event);
    return { at: new Date(event.at), who: "server", strong, text, tone };
  });
}

function setStep(step, state) {
  step.dataset.state = state;
  step.querySelector("em").textContent = STEP_LABELS[state] || "";
}

export function showBooking(booking) {
  shown = booking;
  const killed = booking.state === "running" && booking.runs === killedRun;
  let current = null;
  for (const step of document.querySelectorAll("#steps li")) {
    const state = booking.steps[step.dataset.point];
    setStep(step, killed && state === "running" ? "killed" : state);
    step.removeAttribute("aria-current");
    if (state === "done") current = step;
  }
  if (current) current.setAttribute("aria-current", "step");
  setText("state", stateText(booking, killed));
  setText("count-rides", String(booking.rides));
  setText("count-charges", booking.charges === null ? "?" : String(booking.charges));
  setText("count-receipts", String(booking.receipts));
  showStory();
  showLesson(booking);
  const link = document.getElementById("admin-link");
  link.firstElementChild.href = booking.admin;
  link.hidden = false;
  const trace = document.getElementById("trace-link");
  if (trace) trace.href = booking.trace;
}

function stateText({ state, runs, lock_seconds: lock, response_code: code }, killed) {
  const left = numberOf(Math.ceil(lock), "second");
  if (killed) return `Run ${runs} is dead, and the key is still locked: retries are answered 409. The lock expires in ${left}.`;
  if (state === "running") return `Run ${runs} holds the lock of the key.`;
  if (state === "finished") return `Finished: answered ${code}.`;
  if (state === "stuck") return "Stuck: the key needs manual review.";
  return "Unfinished, and the lock is free: the next request with this key continues.";
}

// Explains a booking that outlived a killed process.
function showLesson({ state, runs, charges, receipts, history, response_code: code }) {
  const names = history.map(({ event }) => event);
  const lost = names.indexOf("run lost");
  lesson.hidden = !(state === "finished" && code === 201 && lost >= 0 && receipts);
  if (lesson.hidden) return;
  const before = history.slice(0, lost).filter(({ event }) => event === "recovery point").map(({ detail }) => detail);
  const heir = history.slice(lost).find(({ event }) => event === "claimed").detail;
  const paid = names.slice(0, lost).includes("call begun") && !before.includes("charge_created");
  const facts = [
    paid ? "The process died after it had called Stripe, and before it could record the charge." : "The process died in the middle of the booking.",
    `Its lock kept every other run out for ${story.dataset.lock} seconds. Retries were answered 409: a request is in progress.`,
    `When the lock had expired, ${heir === "client" ? "the next retry of your browser" : `the ${heir}`} continued from ${before.at(-1) || "started"}.`,
    ...(paid ? ["It called Stripe with the same key as before, so Stripe returned the charge that it had already made."] : []),
    `Result: ${numberOf(runs, "run")}, 1 ride, ${charges === null ? "" : `${numberOf(charges, "charge")}, `}${numberOf(receipts, "receipt")}.`,
  ];
  lesson.lastElementChild.replaceChildren(...facts.map((fact) => Object.assign(document.createElement("li"), { textContent: fact })));
}

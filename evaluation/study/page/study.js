// Shows the pictures that the server names next, and keeps each vote until the server has confirmed it.

const HEADER = "X-Study", KEPT = "study.vote", FIRST_WAIT = 500, MAX_WAIT = 8000;
const CHOICES = [["first", "Picture 1"], ["tie", "No difference"], ["second", "Picture 2"]];
const WAITING = "Waiting for the network. Your vote is not lost. Please keep this page open.";
const KEYS = { 1: "first", ArrowLeft: "first", 2: "second", ArrowRight: "second", 0: "tie", ArrowDown: "tie", ArrowUp: "tie" };
const find = (id) => document.getElementById(id);
const ballot = find("ballot");
const pictures = new Map(); // "17/first" => promise of a blob URL
let state, shown, since, busy = false;

class Refused extends Error {}

// retry until the server answers; only a permanent refusal is an error
async function ask(path, options = {}) {
  for (let wait = FIRST_WAIT; ; wait = Math.min(2 * wait, MAX_WAIT)) {
    let reply, more = 0;
    try {
      reply = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options });
      if (reply.ok) {
        const found = await (path.startsWith("/picture/") ? reply.blob() : reply.json());
        if (find("message").textContent === WAITING) say("");
        return found;
      }
    } catch {
      reply = undefined; // no network, or an incomplete answer
    }
    if (reply && reply.status < 500 && reply.status !== 429) {
      const said = await reply.json().catch(() => ({}));
      throw Object.assign(new Refused(said.error ?? "The server refused this request."), { status: reply.status });
    }
    if (reply?.status === 429) more = 1000 * Number(reply.headers.get("Retry-After") ?? 1);
    else say(WAITING);
    await new Promise((done) => setTimeout(done, Math.max(wait, more)));
  }
}

const post = (path, content, headers = {}) =>
  ask(path, { method: "POST", body: JSON.stringify(content), headers: { "Content-Type": "application/json", ...headers } });

function say(text) {
  if (find("message").textContent !== text) find("message").textContent = text;
}

// a vote that the server may not have received yet; survives a reload if the browser allows storage
const kept = {
  name: () => `${KEPT}.${state.proof.slice(0, 16)}`, // one per invitation opened in this browser
  get: () => { try { return JSON.parse(localStorage.getItem(kept.name())); } catch { return null; } },
  set: (vote) => { try { localStorage.setItem(kept.name(), JSON.stringify(vote)); } catch { /* private mode */ } },
  drop: (id) => { try { if (kept.get()?.id === id) localStorage.removeItem(kept.name()); } catch { /* private mode */ } },
};

function fetchPicture(number, side) {
  const name = `${number}/${side}`;
  if (!pictures.has(name)) {
    const found = ask(`/picture/${name}`).then((blob) => URL.createObjectURL(blob));
    found.catch(() => pictures.delete(name));
    pictures.set(name, found);
  }
  return pictures.get(name);
}

const fetchBoth = (number) => Promise.all([fetchPicture(number, "first"), fetchPicture(number, "second")]);

function forget(before) {
  for (const [name, address] of pictures) {
    if (Number(name.split("/")[0]) < before) {
      pictures.delete(name);
      address.then(URL.revokeObjectURL, () => {});
    }
  }
}

function showProgress() {
  find("name").textContent = document.title = state.name;
  find("bar").max = state.total;
  find("bar").value = state.done;
  find("count").textContent = `${state.done} of ${state.total}`;
  find("progress").hidden = false;
}

function makeQuestions() {
  find("questions").replaceChildren(...state.questions.map(([name, text]) => {
    const field = document.createElement("fieldset");
    const legend = field.appendChild(document.createElement("legend"));
    legend.textContent = text;
    const row = field.appendChild(document.createElement("div"));
    row.className = "choices";
    for (const [value, words] of CHOICES) {
      const label = row.appendChild(document.createElement("label"));
      const input = label.appendChild(document.createElement("input"));
      Object.assign(input, { type: "radio", name, value, required: true });
      label.appendChild(document.createElement("span")).textContent = words;
    }
    field.addEventListener("focusin", () => mark(field));
    return field;
  }));
}

const fields = () => [...find("questions").children];
const answerOf = (field) => field.querySelector("input:checked")?.value;

const isWaiting = () => busy || ballot.hidden || ballot.classList.contains("waiting");

function mark(active) {
  for (const field of fields()) field.classList.toggle("active", field === active);
}

async function show() {
  showProgress();
  const [now, after] = state.next;
  if (!now) {
    ballot.hidden = true;
    say("That was the last pair. Thank you! You can close this page now.");
    return;
  }
  forget(now.number);
  ballot.classList.add("waiting"); // until both are loaded, so that they appear together
  let first, second;
  try {
    [first, second] = await fetchBoth(now.number);
  } catch (error) {
    if (error.status !== 404) throw error;
    state = await ask("/state"); // another tab has moved on
    return show();
  }
  find("first").src = first;
  find("second").src = second;
  await Promise.all([find("first").decode(), find("second").decode()]);
  find("prompt").textContent = now.prompt;
  ballot.reset();
  say("");
  ballot.hidden = false;
  ballot.classList.remove("waiting");
  shown = now.number;
  since = performance.now();
  update();
  mark(fields()[0]);
  find("prompt").focus({ preventScroll: true });
  scrollTo(0, 0);
  if (after) fetchBoth(after.number).catch(() => {});
}

function update() {
  find("send").disabled = busy || !fields().every(answerOf);
}

async function cast(vote) {
  busy = true;
  update();
  try {
    state = await post("/vote", vote, { [HEADER]: state.proof });
  } catch (error) {
    if (error.status === 400) kept.drop(vote.id); // it would never be accepted
    if (error.status !== 409) throw error;
    state = await ask("/state"); // another tab is ahead of this one
  } finally {
    busy = false;
  }
  kept.drop(vote.id);
}

async function send(event) {
  event.preventDefault();
  if (isWaiting() || !fields().every(answerOf)) return;
  const answers = Object.fromEntries(state.questions.map(([name], i) => [name, answerOf(fields()[i])]));
  const id = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const vote = { showing: shown, answers, id, seconds: (performance.now() - since) / 1000 };
  kept.set(vote);
  await guarded(async () => { await cast(vote); await show(); });
}

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  if (isWaiting()) return;
  const value = KEYS[event.key];
  if (value) {
    event.preventDefault();
    const field = fields().find((one) => one.classList.contains("active")) ?? fields()[0];
    const input = field.querySelector(`input[value=${value}]`);
    input.checked = true;
    const next = fields()[fields().indexOf(field) + 1] ?? field;
    mark(next);
    next.querySelector(answerOf(next) ? "input:checked" : "input").focus();
    update();
  } else if (event.key === "Enter" && !find("send").disabled) {
    event.preventDefault();
    ballot.requestSubmit();
  }
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    ballot.hidden = find("intro").hidden = true;
    say(error instanceof Refused ? error.message : "Something went wrong. Please reload this page. Your votes are saved.");
    if (!(error instanceof Refused)) throw error;
  }
}

async function start() {
  const token = location.hash.slice(1);
  state = token ? await post("/enter", { token }) : await ask("/state");
  if (token) history.replaceState(null, "", location.pathname); // hide the token from onlookers
  makeQuestions();
  const vote = kept.get();
  if (vote) await cast(vote);
  showProgress();
  if (state.done || !state.total) return show();
  say("");
  find("intro").hidden = false;
  find("begin").focus();
  fetchBoth(state.next[0].number).catch(() => {});
}

ballot.addEventListener("submit", send);
ballot.addEventListener("change", (event) => {
  const field = event.target.closest("fieldset");
  mark(fields().find((one) => !answerOf(one)) ?? field);
  update();
});
document.addEventListener("keydown", onKey);
find("begin").addEventListener("click", () => {
  find("intro").hidden = true;
  guarded(show);
});
addEventListener("hashchange", () => location.reload()); // a different link was opened in the same tab
guarded(start);

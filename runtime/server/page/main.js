// Puts the parts of the page together.

import { Alternatives } from "./alternatives.js";
import { health, request, setKey } from "./api.js";
import { Conversation } from "./conversation.js";
import { Figures } from "./figures.js";
import { Files } from "./files.js";
import { Library } from "./library.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";

const POLL_MILLISECONDS = 1000;
const NEARLY_FULL = 0.85; // share of the context from which the meter warns
const PROBABILITIES_NAME = "runtime.probabilities";
const find = (selector) => document.querySelector(selector);
const [log, message, send, status] = ["#log", "#message", "#send", "#status"].map(find);

let [model, context] = ["", 0]; // the served model and its context in tokens, once they are known

const settings = new Settings(find("#settings"));
const figures = new Figures(find("#figures"));
new Alternatives(find("#alternatives"), log);
const templates = { turn: find("#turn"), edit: find("#edit"), call: find("#call") };
const onSave = (kept) => library.save(kept);
const conversation = new Conversation({ log, templates, settings, getModel, onChange: showState, onSave, onError });
const library = new Library({ element: find("#kept"), template: find("#kept-item"), store: new Store(), conversation });

function showState() {
  const running = conversation.isRunning;
  document.body.classList.toggle("running", running);
  document.body.classList.toggle("empty", conversation.isEmpty);
  send.textContent = running ? "Stop" : "Send";
  send.disabled = !running && !message.value.trim() && !files.all.length;
  message.rows = Math.min(8, message.value.split("\n").length); // for browsers that do not size fields by content
  status.textContent = running ? "The model is answering." : conversation.isEmpty ? "" : "The answer is complete.";
  library.mark();
  showContext();
}

/** Shows how much of the context the conversation takes. */
function showContext() {
  const used = conversation.numTokens;
  const words = used ? `${used.toLocaleString("en")} of ${context.toLocaleString("en")}` : context.toLocaleString("en");
  find("#context").textContent = context ? `${words} tokens` : "";
  Object.assign(find("#used"), { max: context, low: NEARLY_FULL * context, high: context, value: used });
}

const files = new Files({
  list: find("#attached"),
  input: find("#composer input[type=file]"),
  area: find("main"),
  onChange: showState,
  onRefusal: (words) => (find("#refused").textContent = words),
});
find("#attach").addEventListener("click", () => find("#composer input[type=file]").click());

function onError(error) {
  if (error.status === 401) askKey();
  settings.point(error.param);
}

// The message

function submit() {
  if (send.disabled || conversation.isRunning) return;
  if (!conversation.send({ user: message.value, files: files.all })) return;
  files.take();
  message.value = "";
  showState();
}

find("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (conversation.isRunning) conversation.stop();
  else submit();
});
message.addEventListener("input", showState);
message.addEventListener("keydown", (event) => {
  const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (!sends || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  submit();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    message.value = example.textContent;
    showState();
    message.focus();
  });
}

// The header

find("#new").addEventListener("click", () => {
  conversation.open();
  message.focus();
});
const probabilities = find("#probabilities");
function showProbabilities(shown) {
  probabilities.setAttribute("aria-pressed", String(shown));
  sessionStorage.setItem(PROBABILITIES_NAME, String(shown));
  conversation.showProbabilities(shown);
}
probabilities.addEventListener("click", () => showProbabilities(!conversation.probabilities));
showProbabilities(sessionStorage.getItem(PROBABILITIES_NAME) === "true");

// Drawers, on narrow screens

const drawers = ["kept", "side"].map((name) => ({ name, button: find(`[aria-controls=${name}]`) }));
function openDrawer({ name, button }, open) {
  document.body.classList.toggle(`${name}-open`, open);
  button.setAttribute("aria-expanded", String(open));
}
for (const drawer of drawers) {
  drawer.button.addEventListener("click", () => openDrawer(drawer, drawer.button.getAttribute("aria-expanded") !== "true"));
  find(`#${drawer.name} .close`).addEventListener("click", () => {
    openDrawer(drawer, false);
    drawer.button.focus();
  });
}
find("#kept ul").addEventListener("click", ({ target }) => target.closest(".open") && openDrawer(drawers[0], false));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") for (const drawer of drawers) openDrawer(drawer, false);
});

// The key

let locked = false;

function askKey(words = "This server asks for a key.") {
  locked = true;
  find("#key-form").hidden = false;
  find("#key-words").textContent = words;
  find("#key").focus();
}

find("#key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(find("#key").value);
  locked = false;
  find("#key-form").hidden = true;
  await refresh("That key is not accepted.");
  if (!locked) message.focus();
});

// What is known of the server


async function getModel() {
  if (model) return model;
  const { data } = await (await request("v1/models")).json();
  [{ id: model, max_model_len: context }] = data;
  find("#model").textContent = document.title = model;
  showContext();
  return model;
}

async function refresh(refused) {
  try {
    await getModel();
    await figures.update();
  } catch (error) {
    if (error.status === 401) askKey(refused);
  }
}

async function poll() {
  if (!document.hidden) {
    const state = await health();
    find("#health").dataset.state = state === "ok" ? "ok" : "bad";
    find("#health-words").textContent = state === "ok" ? "ready" : state;
    if (state !== "not reachable" && !locked) await refresh();
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

showState();
library.begin();
poll();

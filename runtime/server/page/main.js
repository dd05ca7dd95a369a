// Puts the parts of the page together.

import { Alternatives } from "./alternatives.js";
import { health, request, setKey } from "./api.js";
import { Conversation } from "./conversation.js";
import { Figures } from "./figures.js";
import { Settings } from "./settings.js";

const POLL_MILLISECONDS = 1000;
const find = (selector) => document.querySelector(selector);
const [log, message, send, status] = ["#log", "#message", "#send", "#status"].map(find);

const settings = new Settings(find("#settings"));
const figures = new Figures(find("#figures"));
new Alternatives(find("#alternatives"), log);
const template = find("#turn");
const conversation = new Conversation({ log, template, settings, getModel, onChange: showState, onError });

function showState() {
  const running = conversation.isRunning;
  document.body.classList.toggle("running", running);
  document.body.classList.toggle("empty", !conversation.turns.length);
  send.textContent = running ? "Stop" : "Send";
  send.disabled = !running && !message.value.trim();
  message.rows = Math.min(8, message.value.split("\n").length); // for browsers that do not size fields by content
  status.textContent = running ? "The model is answering." : conversation.turns.length ? "The answer is complete." : "";
}

function onError(error) {
  if (error.status === 401) askKey();
  settings.point(error.param);
}

// The message

function submit() {
  if (!message.value.trim() || conversation.isRunning) return;
  conversation.send(message.value);
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
  conversation.clear();
  message.focus();
});
find("#probabilities").addEventListener("click", ({ currentTarget: button }) => {
  const shown = document.body.classList.toggle("probabilities");
  button.setAttribute("aria-pressed", String(shown));
});
const drawer = find("#drawer");
function openDrawer(open) {
  document.body.classList.toggle("drawer-open", open);
  drawer.setAttribute("aria-expanded", String(open));
}
drawer.addEventListener("click", () => openDrawer(!document.body.classList.contains("drawer-open")));
find("#close-drawer").addEventListener("click", () => {
  openDrawer(false);
  drawer.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") openDrawer(false);
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

let model = "";

async function getModel() {
  if (model) return model;
  const { data } = await (await request("v1/models")).json();
  const [{ id, max_model_len: context }] = data;
  model = id;
  find("#model").textContent = document.title = id;
  find("#context").textContent = `${context.toLocaleString("en")} tokens`;
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
poll();

// Turns of a conversation: the user's message, the streamed answer, and their buttons.

import { Answer } from "./answer.js";
import { chatRequest, generate, textRequest } from "./api.js";

const NEAR_END = 60; // pixels
const ENDS = { length: "reached the token limit", stop: "", timeout: "ran out of time", stopped: "stopped" };

class Turn {
  constructor(template, user) {
    this.element = template.content.firstElementChild.cloneNode(true);
    const find = (name) => this.element.querySelector(`.${name}`);
    [this.note, this.error, this.facts] = [find("note"), find("error"), find("facts")];
    this.answer = new Answer(find("text"));
    this.user = user;
    find("user").textContent = user;
  }

  /** What is left of it in the next request. */
  get spoken() {
    return { user: this.user, answer: this.answer.text };
  }

  begin() {
    this.answer.reset();
    [this.start, this.first, this.count] = [performance.now(), null, 0];
    this.error.textContent = this.facts.textContent = "";
    this.element.dataset.state = "running";
  }

  add(piece) {
    this.count = piece.usage?.completion_tokens ?? this.count + piece.tokens.length;
    if (piece.tokens.length) this.first ??= performance.now();
    this.answer.add(piece);
    this.tell("");
  }

  tell(end) {
    const seconds = this.first ? (performance.now() - this.first) / 1000 : 0;
    const facts = this.count ? [`${this.count} token${this.count === 1 ? "" : "s"}`] : [];
    if (this.count > 1 && seconds) facts.push(`${((this.count - 1) / seconds).toFixed(0)} tokens/s`);
    if (this.first) facts.push(`first after ${((this.first - this.start) / 1000).toFixed(2)} s`);
    if (end) facts.push(end);
    this.facts.textContent = facts.join(" \u00b7 ");
  }

  end(reason, message = "") {
    this.answer.finish();
    this.tell(ENDS[reason] ?? reason);
    this.error.textContent = message;
    this.element.dataset.state = message ? "failed" : "done";
  }
}

/**
 * `getModel` gives the name of the model, in time. `onChange` is called whenever generating starts or stops, and
 * `onError` with every refusal.
 */
export class Conversation {
  constructor({ log, template, settings, getModel, onChange, onError }) {
    Object.assign(this, { log, template, settings, getModel, onChange, onError });
    this.list = log.querySelector(".turns");
    this.turns = [];
    this.controller = null;
    this.list.addEventListener("click", (event) => this.act(event.target.closest("button")));
  }

  get isRunning() {
    return Boolean(this.controller);
  }

  clear() {
    this.stop();
    this.controller = null;
    this.turns = [];
    this.list.replaceChildren();
    this.onChange();
  }

  stop() {
    this.controller?.abort();
  }

  send(text) {
    if (this.isRunning) return;
    // A question that got no answer is not repeated to the model.
    this.turns = this.turns.filter((turn) => turn.answer.text);
    const turn = new Turn(this.template, text);
    this.turns.push(turn);
    this.list.append(turn.element);
    this.run(turn);
  }

  act(button) {
    const turn = this.turns.at(-1);
    if (button?.dataset.action === "again" && turn && !this.isRunning) this.run(turn);
    if (button?.dataset.action === "copy") this.copy(button);
  }

  async copy(button) {
    const text = button.closest(".turn").querySelector(".text").textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.dataset.done = "Copied";
    } catch {
      button.dataset.done = "Not allowed"; // browsers have no clipboard for pages from other machines without TLS
    }
    setTimeout(() => delete button.dataset.done, 1500);
  }

  async run(turn) {
    const controller = new AbortController();
    this.controller = controller;
    turn.begin();
    this.toEnd();
    this.onChange();
    try {
      const reason = await this.answer(turn, controller.signal);
      turn.end(reason);
    } catch (error) {
      if (error.name === "AbortError") turn.end("stopped");
      else turn.end("", error.message);
      if (error.name !== "AbortError") this.onError(error);
    }
    if (this.controller === controller) this.controller = null;
    this.follow(() => this.onChange());
  }

  async answer(turn, signal) {
    try {
      return await this.stream(turn, signal);
    } catch (error) {
      if (this.settings.mode !== "chat" || !/no chat template/.test(error.message)) throw error;
    }
    this.settings.mode = "text";
    turn.note.textContent = "This model has no chat template, so it continues the text as it stands.";
    return this.stream(turn, signal);
  }

  async stream(turn, signal) {
    const { mode, system, sampling } = this.settings;
    const make = mode === "chat" ? chatRequest : textRequest;
    const spoken = this.turns.map((one) => one.spoken);
    const model = await this.getModel();
    const { path, body, read } = make(spoken, { system, sampling: { model, ...sampling } });
    let reason = "";
    for await (const piece of generate({ path, body, read }, signal)) {
      this.follow(() => turn.add(piece));
      reason = piece.finish ?? reason;
    }
    return reason;
  }

  /** Keeps the end in sight, unless the reader has gone back. */
  follow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) this.toEnd();
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

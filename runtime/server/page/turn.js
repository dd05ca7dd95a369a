// One turn on the page: the user's message, the answer with its figures, and buttons.

import { Answer } from "./answer.js";
import { Calls, resultItems } from "./calls.js";
import { fileItem } from "./files.js";
import { Markdown } from "./markdown.js";

const ENDS = { length: "reached the token limit", stop: "", tool_calls: "", timeout: "ran out of time", stopped: "stopped" };

export class Turn {
  /**
   * `record` is what is kept of the turn; it is brought up to date while the answer comes. `onResults` gets results of
   * the calls in the answer.
   */
  constructor(templates, record, onResults) {
    this.element = templates.turn.content.firstElementChild.cloneNode(true);
    this.record = record;
    this.answer = new Answer(this.find("text"), this.find("reasoning"));
    this.answer.restore(record);
    this.calls = new Calls(this.find("calls"), templates.call, onResults);
    this.showPrompt();
    this.state = record.error ? "failed" : "done";
    this.showRecord();
  }

  showPrompt() {
    const { mode, user, files, results } = this.record;
    const element = this.find("user");
    Object.assign(element, { textContent: mode === "chat" ? "" : user, hidden: !user });
    if (mode === "chat") new Markdown(element).show(user, true);
    this.find("files").replaceChildren(...files.map((file) => fileItem(file)));
    this.find("results").replaceChildren(...resultItems(results));
  }

  find(name) {
    return this.element.querySelector(`.${name}`);
  }

  get state() {
    return this.element.dataset.state;
  }

  set state(value) {
    this.element.dataset.state = value;
    this.element.classList.toggle("unanswered", this.answer.isEmpty);
  }

  get isAnswered() {
    return !this.answer.isEmpty;
  }

  begin(mode) {
    [this.start, this.first, this.count] = [performance.now(), null, 0];
    Object.assign(this.record, { facts: "", error: "", note: "", tokens: 0 });
    this.setMode(mode);
    this.state = "running";
    this.showRecord();
  }

  /** Shows prompt and answer as a "chat" or as plain "text". */
  setMode(mode) {
    this.answer.reset(mode);
    this.record.mode = mode;
    this.showPrompt();
  }

  /** Adds a sentence to the note above the answer. */
  explain(sentence) {
    this.record.note = `${this.record.note} ${sentence}`.trim();
    this.showRecord();
  }

  add(piece) {
    const { text, reasoning, calls, tokens, usage } = piece;
    if (usage) this.record.tokens = usage.total_tokens;
    this.count = usage?.completion_tokens ?? this.count + (tokens.length || (text || reasoning || calls.length ? 1 : 0));
    if (this.count) this.first ??= performance.now();
    this.answer.add(piece);
  }

  draw(probabilities) {
    this.answer.draw(probabilities);
    this.calls.show(this.answer.calls);
    if (this.state === "running") this.tell("");
  }

  tell(end) {
    const seconds = this.first ? (performance.now() - this.first) / 1000 : 0;
    const facts = this.count ? [`${this.count} token${this.count === 1 ? "" : "s"}`] : [];
    if (this.count > 1 && seconds) facts.push(`${((this.count - 1) / seconds).toFixed(0)} tokens/s`);
    if (this.first) facts.push(`first after ${((this.first - this.start) / 1000).toFixed(2)} s`);
    if (end) facts.push(end);
    this.record.facts = facts.join(" \u00b7 ");
    this.showRecord();
  }

  end(reason, error = "") {
    this.answer.finish();
    this.record.error = error;
    this.tell(ENDS[reason] ?? reason);
    this.state = error ? "failed" : "done";
  }

  /** Brings the record up to date, to be kept. */
  write() {
    const { content, thoughts, calls } = this.answer;
    Object.assign(this.record, { content, reasoning: thoughts, calls });
  }

  showRecord() {
    const { note, error, facts, model } = this.record;
    [this.find("note").textContent, this.find("error").textContent] = [note, error];
    Object.assign(this.find("facts"), { textContent: facts, title: model });
  }

  /** Says which of several versions this is. */
  showVersions(number, total) {
    this.find("versions").hidden = total < 2;
    this.find("version").textContent = `${number} / ${total}`;
    this.element.querySelector("[data-action=previous]").disabled = number === 1;
    this.element.querySelector("[data-action=next]").disabled = number === total;
  }

  /** A field in place of the message; `onDone` gets the new text. */
  edit(template, onDone) {
    if (this.element.querySelector(".edit")) return;
    const form = template.content.firstElementChild.cloneNode(true);
    const field = form.querySelector("textarea");
    const [user, button] = [this.find("user"), this.element.querySelector("[data-action=edit]")];
    const close = () => {
      form.remove();
      user.hidden = !this.record.user;
      button.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim() && !this.record.files.length) return;
      close();
      onDone(field.value);
    });
    form.querySelector("[data-action=cancel]").addEventListener("click", close);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    field.value = this.record.user;
    user.hidden = true;
    user.before(form);
    field.focus();
  }
}

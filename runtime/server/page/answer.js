// One answer: folded reasoning, calls of tools, and text as Markdown, plain, or token by token with probabilities.

import { Markdown } from "./markdown.js";
import { splitReasoning } from "./reasoning.js";
import { Tokens } from "./tokens.js";

export class Answer {
  /** `element` holds the text, `fold` the reasoning. */
  constructor(element, fold) {
    [this.element, this.fold] = [element, fold];
    this.reset("chat");
  }

  /** `mode`: "chat", whose text is Markdown, or "text". */
  reset(mode) {
    this.mode = mode;
    this.content = this.thoughts = "";
    this.calls = [];
    this.isSettled = false;
    [this.reading, this.source] = [view("reading"), view("source")];
    this.source.setAttribute("role", "group");
    this.source.setAttribute("aria-label", "Answer; the arrow keys go from token to token");
    this.tokens = new Tokens(this.source);
    this.markdown = new Markdown(this.reading);
  }

  /** Takes an answer over that was kept; its tokens are not known any more. */
  restore({ mode, content, reasoning, calls }) {
    this.reset(mode);
    [this.content, this.thoughts, this.calls, this.isSettled] = [content, reasoning, calls, true];
  }

  add({ text, reasoning, calls, tokens }) {
    for (const part of calls) this.addCall(part);
    this.content += text;
    this.thoughts += reasoning;
    this.tokens.add({ text: reasoning + text, tokens });
  }

  /** Calls come whole or in parts. */
  addCall({ index, id, function: { name, arguments: text } = {} }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= name ?? "";
    call.arguments += text ?? "";
  }

  finish() {
    this.tokens.finish();
    this.isSettled = true;
  }

  get parts() {
    if (this.thoughts) return { reasoning: this.thoughts.trim(), text: this.content, isOpen: !this.content };
    return this.mode === "chat" ? splitReasoning(this.content) : { reasoning: "", text: this.content, isOpen: false };
  }

  /** The text without reasoning: what later turns repeat to the model. */
  get text() {
    return this.parts.text;
  }

  get isEmpty() {
    return !this.content && !this.thoughts && !this.calls.length;
  }

  /** Brings the elements up to date; with `probabilities`, tokens are shown as they came where they are known. */
  draw(probabilities) {
    const bySource = probabilities && !this.tokens.isEmpty;
    const wanted = bySource ? this.source : this.reading;
    if (this.element.firstChild !== wanted) this.element.replaceChildren(wanted);
    const { reasoning, text, isOpen } = this.parts;
    this.drawReasoning(bySource ? "" : reasoning, isOpen && !this.isSettled);
    if (this.mode === "chat") this.markdown.show(text, this.isSettled);
    else this.reading.textContent = text;
  }

  drawReasoning(reasoning, isOpen) {
    this.fold.hidden = !reasoning;
    this.fold.querySelector("summary").textContent = isOpen ? "Reasoning \u2026" : "Reasoning";
    this.fold.querySelector(".thoughts").textContent = reasoning;
  }
}

function view(name) {
  const made = document.createElement("div");
  made.className = name;
  return made;
}

// The conversation on the page: which turns are shown, the one that is being answered, and the buttons of each.

import { chatRequest, generate, textRequest } from "./api.js";
import { newTurn, randomId } from "./archive.js";
import { ROOT, Tree } from "./tree.js";
import { Turn } from "./turn.js";

const NEAR_END = 60; // pixels
const SAVE_MILLISECONDS = 2000; // at least between two savings of an answer that still grows
const TITLE_LENGTH = 60;
const NO_TEMPLATE = "This model has no chat template, so it continues the text as it stands.";
const LESS_ROOM = "The context has less room than Max tokens asks for: the answer may fill the rest of it.";

/**
 * `getModel` gives the name of the model, in time. `onChange` is called whenever generating starts or stops, `onSave`
 * with what is to be kept, and `onError` with every refusal.
 */
export class Conversation {
  constructor({ log, templates, settings, getModel, onChange, onSave, onError }) {
    Object.assign(this, { log, templates, settings, getModel, onChange, onSave, onError });
    this.list = log.querySelector(".turns");
    this.frame = 0;
    this.probabilities = false;
    this.list.addEventListener("click", (event) => this.act(event.target.closest("button")));
    this.set(fresh());
  }

  set(kept) {
    this.controller = null;
    this.kept = kept;
    this.turns = new Map(); // by id, those that were shown before
    this.show();
  }

  get isRunning() {
    return Boolean(this.controller);
  }

  get isEmpty() {
    return !this.list.firstChild;
  }

  /** Tokens of the context that the shown turns take, as the server counted them last; 0 before the first answer. */
  get numTokens() {
    return this.kept.tree.path.findLast((record) => record.tokens)?.tokens ?? 0;
  }

  /** Shows a conversation of the store, or a new one; a running answer is stopped and kept as far as it came. */
  open(stored = null) {
    this.stop();
    this.set(stored ? { ...stored, tree: new Tree(stored) } : fresh());
    this.onChange();
    this.toEnd();
  }

  /** Opens a new one in place of one that is deleted, which is not saved any more. */
  forget() {
    this.kept.isDeleted = true;
    this.open();
  }

  stop() {
    this.controller?.abort();
  }

  /** Shows the path that is chosen; turns that were shown before are taken over. */
  show() {
    const { tree } = this.kept;
    const shown = tree.path.map((record) => {
      const turn = this.turnOf(record);
      const versions = tree.versions(record);
      turn.showVersions(versions.indexOf(record) + 1, versions.length);
      return turn;
    });
    this.list.replaceChildren(...shown.map((turn) => turn.element));
    return shown;
  }

  turnOf(record) {
    if (!this.turns.has(record.id)) {
      this.turns.set(record.id, new Turn(this.templates, record, (results) => this.sendResults(record, results)));
      this.turns.get(record.id).draw(this.probabilities);
    }
    return this.turns.get(record.id);
  }

  /** Sends `{user, files}`; false where the conversation cannot go on yet. */
  send(prompt) {
    if (this.isRunning) return false;
    const { tree } = this.kept;
    const last = tree.path.at(-1);
    // A question that got no answer is not repeated to the model.
    const dropped = last && !this.turnOf(last).isAnswered;
    const parent = dropped ? tree.turns.get(last.parent) : last;
    const calls = parent && this.turnOf(parent).calls;
    if (calls?.fields.length) {
      calls.reopen([]);
      calls.focus();
      return false;
    }
    if (dropped) tree.remove(last);
    this.add(prompt, parent?.id ?? ROOT);
    return true;
  }

  sendResults(record, results) {
    if (!this.isRunning) this.add({ user: "", results }, record.id);
  }

  /** Adds a turn behind `parent`, and asks for its answer. */
  add(prompt, parent) {
    const record = newTurn(parent, prompt);
    this.kept.tree.add(record);
    this.kept.title ||= (record.user.trim() || record.files[0].name).replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
    this.run(this.show().at(-1));
    this.toEnd();
  }

  act(button) {
    const shown = button && [...this.turns.values()].find((turn) => turn.element.contains(button));
    if (!shown) return;
    const { action } = button.dataset;
    if (action === "copy") this.copy(button, shown.answer.text);
    if (action === "copy-code") this.copy(button, codeOf(button));
    if (this.isRunning) return;
    if (action === "again") this.again(shown);
    if (action === "edit") this.edit(shown);
    if (action === "previous" || action === "next") this.step(shown, action);
  }

  /** Another version of an answer; one that is empty is replaced. */
  again(turn) {
    if (turn.isAnswered) this.add(turn.record, turn.record.parent);
    else this.run(turn);
  }

  /** Another message, or other results of the calls in front of the turn. */
  edit(turn) {
    const { parent, results, files } = turn.record;
    if (results.length) this.turnOf(this.kept.tree.turns.get(parent)).calls.reopen(results);
    else turn.edit(this.templates.edit, (user) => this.add({ user, files }, parent));
  }

  step(turn, action) {
    const { tree } = this.kept;
    const versions = tree.versions(turn.record);
    const other = versions[versions.indexOf(turn.record) + (action === "next" ? 1 : -1)];
    if (!other) return;
    tree.choose(other);
    this.show();
    this.save(this.kept);
    const { element } = this.turnOf(other);
    const buttons = [action, action === "next" ? "previous" : "next"].map((name) => element.querySelector(`[data-action=${name}]`));
    buttons.find((button) => !button.disabled).focus();
  }

  async copy(button, text) {
    try {
      await navigator.clipboard.writeText(text);
      button.dataset.done = "Copied";
    } catch {
      button.dataset.done = "Not allowed"; // browsers have no clipboard for pages from other machines without TLS
    }
    setTimeout(() => delete button.dataset.done, 1500);
  }

  async run(turn) {
    const { kept } = this;
    const controller = new AbortController();
    this.controller = controller;
    turn.begin(this.settings.mode);
    turn.draw(this.probabilities);
    this.save(kept);
    this.onChange();
    try {
      const reason = await this.answer(turn, kept, controller.signal);
      turn.end(reason);
    } catch (error) {
      if (error.name === "AbortError") turn.end("stopped");
      else turn.end("", error.message);
      if (error.name !== "AbortError") this.onError(error);
    }
    if (this.controller === controller) this.controller = null;
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.follow(() => turn.draw(this.probabilities));
    turn.write();
    this.save(kept);
    this.onChange();
  }

  /** Asks again where the server refuses something that can be changed; `changes` replace fields of the request. */
  async answer(turn, kept, signal, changes = {}) {
    try {
      return await this.stream(turn, kept, signal, changes);
    } catch (error) {
      if (error.code === "context_length_exceeded" && error.param === "max_tokens") {
        turn.explain(LESS_ROOM);
        changes = { max_tokens: undefined };
      } else if (this.settings.mode === "chat" && /no chat template/.test(error.message)) {
        this.settings.mode = "text";
        turn.setMode("text");
        turn.explain(NO_TEMPLATE);
      } else {
        throw error;
      }
    }
    return this.answer(turn, kept, signal, changes);
  }

  async stream(turn, kept, signal, changes) {
    const { mode, system, sampling } = this.settings;
    const [make, form] = mode === "chat" ? [chatRequest, this.settings.fields] : [textRequest, {}];
    const spoken = kept.tree.upTo(turn.record).map((record) => this.spoken(record, turn.record));
    const model = await this.getModel();
    turn.record.model = model;
    const options = { system, form, sampling: { model, ...sampling, ...changes }, probabilities: this.probabilities };
    const request = make(spoken, options);
    let [reason, saved] = ["", performance.now()];
    for await (const piece of generate(request, signal)) {
      turn.add(piece);
      this.drawSoon(turn);
      reason = piece.finish ?? reason;
      if (performance.now() - saved < SAVE_MILLISECONDS) continue;
      saved = performance.now();
      turn.write();
      this.save(kept);
    }
    return reason;
  }

  /** A turn as requests repeat it; the one that is asked for has no answer yet. */
  spoken(record, asked) {
    const { text, calls } = record === asked ? { text: "", calls: [] } : this.turnOf(record).answer;
    return { ...record, answer: text, calls };
  }

  /** Draws once a frame, however fast pieces come. */
  drawSoon(turn) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.follow(() => turn.draw(this.probabilities));
    });
  }

  showProbabilities(shown) {
    this.probabilities = shown;
    for (const turn of this.turns.values()) turn.draw(shown);
  }

  save(kept) {
    if (kept.isDeleted || !kept.tree.turns.size) return;
    kept.updated = Date.now();
    const { id, title, created, updated, tree } = kept;
    this.onSave({ id, title, created, updated, ...tree.toJSON() });
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

function fresh() {
  return { id: randomId(), title: "", created: Date.now(), updated: Date.now(), tree: new Tree() };
}

function codeOf(button) {
  return button.closest(".code").querySelector("code").textContent.replace(/\n$/, "");
}

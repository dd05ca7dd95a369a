// The list of kept conversations: open, rename, delete, export, import.

import { MAX_IMPORT_BYTES, readArchive, writeArchive } from "./archive.js";

const OPEN_NAME = "runtime.open"; // the conversation of this tab, to be there after a reload

export class Library {
  /** `element` holds list, note and buttons; `conversation` is what is on the page. */
  constructor({ element, template, store, conversation }) {
    Object.assign(this, { element, template, store, conversation });
    const parts = ["ul", ".kept-note", "input[type=file]", "input[type=search]"];
    [this.list, this.note, this.input, this.search] = parts.map((part) => element.querySelector(part));
    this.numBusy = 0;
    this.lastOpen = sessionStorage.getItem(OPEN_NAME);
    this.list.addEventListener("click", (event) => this.act(event.target.closest("button")));
    this.list.addEventListener("focusout", ({ target }) => makeSure(target, false));
    element.querySelector("#import").addEventListener("click", () => this.input.click());
    element.querySelector("#export-all").addEventListener("click", () => this.attempt(() => this.exportAll()));
    this.input.addEventListener("change", () => this.attempt(() => this.import()));
    this.search.addEventListener("input", () => this.refresh());
    document.addEventListener("visibilitychange", () => document.hidden || this.refresh());
  }

  /** Shows the list, and the conversation that this tab had before a reload. */
  async begin() {
    await this.refresh();
    const id = this.lastOpen;
    if (id && this.conversation.isEmpty) await this.attempt(() => this.open(id));
  }

  refresh() {
    return this.attempt(async () => {
      const query = this.search.value.trim().toLowerCase();
      const entries = await (query ? this.store.find(query) : this.store.list());
      if (this.list.querySelector("input")) return; // a title is being changed
      if (query !== this.search.value.trim().toLowerCase()) return; // a later search is under way
      const focused = this.list.contains(document.activeElement) && idOf(document.activeElement);
      this.list.replaceChildren(...entries.map((entry) => this.item(entry)));
      if (focused) this.itemOf(focused)?.querySelector(".open").focus();
    });
  }

  /** Does something with the store; a failure is told where the list is. */
  async attempt(change) {
    this.setBusy(1);
    try {
      await change();
    } catch (error) {
      this.note.textContent = error.name === "QuotaExceededError" ? FULL : error.message;
      this.note.classList.add("failed");
    }
    this.setBusy(-1);
  }

  setBusy(change) {
    this.numBusy += change;
    this.element.setAttribute("aria-busy", String(this.numBusy > 0));
  }

  item({ id, title }) {
    const item = this.template.content.firstElementChild.cloneNode(true);
    item.dataset.id = id;
    const open = item.querySelector(".open");
    open.textContent = open.title = title || "Untitled";
    for (const button of item.querySelectorAll("[aria-label]")) {
      button.setAttribute("aria-label", `${button.getAttribute("aria-label")}: ${title}`);
    }
    if (id === this.conversation.kept.id) open.setAttribute("aria-current", "true");
    return item;
  }

  itemOf(id) {
    return [...this.list.children].find((item) => item.dataset.id === id);
  }

  /** Marks the conversation on the page. */
  mark() {
    const { id } = this.conversation.kept;
    sessionStorage.setItem(OPEN_NAME, id);
    for (const item of this.list.children) {
      const open = item.querySelector(".open");
      if (item.dataset.id === id) open?.setAttribute("aria-current", "true");
      else open?.removeAttribute("aria-current");
    }
  }

  save(kept) {
    return this.attempt(async () => {
      await this.store.put(kept);
      const shown = this.list.firstElementChild;
      if (shown?.dataset.id !== kept.id || shown.querySelector(".open")?.textContent !== kept.title) await this.refresh();
    });
  }

  act(button) {
    if (!button) return;
    const id = idOf(button);
    const actions = { rename: () => this.rename(id), delete: () => this.delete(id, button), export: () => this.export(id) };
    this.attempt(actions[button.dataset.action] ?? (() => this.open(id)));
  }

  async open(id) {
    const kept = await this.store.get(id);
    if (kept && id !== this.conversation.kept.id) this.conversation.open(kept);
    if (!kept) await this.refresh(); // deleted in another tab
  }

  rename(id) {
    const open = this.itemOf(id).querySelector(".open");
    const field = Object.assign(document.createElement("input"), { type: "text", value: open.textContent, maxLength: 200 });
    field.setAttribute("aria-label", "Title");
    let isOver = false;
    const end = (title) => {
      if (isOver) return;
      isOver = true;
      field.replaceWith(open);
      open.focus();
      if (title && title !== open.textContent) this.attempt(() => this.retitle(id, title));
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(field.value.trim());
      if (event.key === "Escape") end("");
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    open.replaceWith(field);
    field.select();
  }

  async retitle(id, title) {
    const kept = await this.store.get(id);
    if (kept) await this.store.put({ ...kept, title });
    if (id === this.conversation.kept.id) this.conversation.kept.title = title;
    await this.refresh();
  }

  /** Deletes at the second click; the button asks after the first. */
  async delete(id, button) {
    if (!button.classList.contains("sure")) {
      makeSure(button, true);
      return;
    }
    if (id === this.conversation.kept.id) this.conversation.forget();
    await this.store.delete(id);
    await this.refresh();
  }

  async export(id) {
    const kept = await this.store.get(id);
    download(`${fileName(kept.title)}.json`, writeArchive([kept]));
  }

  async exportAll() {
    download("conversations.json", writeArchive(await this.store.all()));
  }

  /** Adds the conversations of a file; those that are there stay. */
  async import() {
    const [file] = this.input.files;
    this.input.value = "";
    if (!file) return;
    if (file.size > MAX_IMPORT_BYTES) throw new Error(`The file has ${file.size} bytes; at most ${MAX_IMPORT_BYTES} are read.`);
    const found = readArchive(await file.text());
    for (const kept of found) await this.store.put(kept);
    this.note.classList.remove("failed");
    this.note.textContent = `Imported ${found.length} conversation${found.length === 1 ? "" : "s"}.`;
    await this.refresh();
  }
}

const FULL = "Not kept: the browser's storage is full. Export and delete conversations.";

/** A delete button that was clicked once, or not yet. */
function makeSure(button, sure) {
  if (button.dataset.action !== "delete") return;
  button.classList.toggle("sure", sure);
  const [from, to] = sure ? [/^Delete/, "Click again to delete"] : [/^Click again to delete/, "Delete"];
  button.setAttribute("aria-label", button.getAttribute("aria-label").replace(from, to));
}

function idOf(element) {
  return element.closest("li").dataset.id;
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation";
}

function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

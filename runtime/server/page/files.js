// Text files that are attached to the message being written; what else there is of files.

const MAX_BYTES = 1024 ** 2; // each
const LIMIT = "1 MiB";

export class Files {
  /** `list` shows them, `input` chooses them, and they may be dropped on or pasted into `area`; `onRefusal` gets a sentence. */
  constructor({ list, input, area, onChange, onRefusal }) {
    Object.assign(this, { list, onChange, onRefusal });
    this.all = [];
    input.addEventListener("change", async () => {
      const chosen = [...input.files];
      input.value = "";
      await this.add(chosen);
    });
    area.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    area.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    area.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
  }

  async add(chosen) {
    this.onRefusal("");
    for (const file of chosen) {
      try {
        this.all.push(await readFile(file));
      } catch (error) {
        this.onRefusal(error.message);
      }
    }
    this.show();
  }

  /** The files, which leave the list. */
  take() {
    const taken = this.all;
    this.all = [];
    this.onRefusal("");
    this.show();
    return taken;
  }

  show() {
    const remove = (file) => {
      this.all = this.all.filter((other) => other !== file);
      this.show();
    };
    this.list.replaceChildren(...this.all.map((file) => fileItem(file, () => remove(file))));
    this.onChange();
  }
}

function hasFiles({ dataTransfer }) {
  return dataTransfer.types.includes("Files");
}

/** `{name, text}` of a file; throws an Error that says why it is refused. */
async function readFile(file) {
  const name = file.name.replace(/[\p{Cc}\p{Cf}`]/gu, " ");
  if (/^(image|audio|video)\//.test(file.type)) throw new Error(`${name} cannot be attached: the model reads text only.`);
  if (file.size > MAX_BYTES) throw new Error(`${name} has ${file.size} bytes; files of at most ${LIMIT} can be attached.`);
  const refusal = new Error(`${name} is not a text in UTF-8, so it cannot be attached.`);
  const content = await file.arrayBuffer().catch((error) => {
    throw new Error(`${name} cannot be read: ${error.message}`);
  });
  const text = decode(content);
  if (text === null || text.includes("\0")) throw refusal;
  return { name, text };
}

function decode(content) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(content);
  } catch {
    return null;
  }
}

/** A file as an item of a list: its content unfolds, and with `onRemove` it can be taken back. */
export function fileItem({ name, text }, onRemove = null) {
  const [item, fold, title, content] = ["li", "details", "summary", "pre"].map((tag) => document.createElement(tag));
  title.textContent = `${name} \u00b7 ${sizeOf(text)}`;
  content.textContent = text;
  content.tabIndex = 0;
  fold.append(title, content);
  item.append(fold);
  if (onRemove) item.append(removeButton(name, onRemove));
  return item;
}

function removeButton(name, onRemove) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: "\u00d7" });
  button.setAttribute("aria-label", `Remove ${name}`);
  button.addEventListener("click", onRemove);
  return button;
}

function sizeOf(text) {
  const bytes = new TextEncoder().encode(text).length;
  return bytes < 1024 ? `${bytes} B` : `${(bytes / 1024).toFixed(0)} KiB`;
}

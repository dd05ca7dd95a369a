// Conversations in the browser's database (IndexedDB), which the browser limits by the disk.

const [NAME, VERSION] = ["runtime", 1];
const [ENTRIES, CONVERSATIONS] = ["entries", "conversations"]; // what the list shows; all turns

export class Store {
  /** Titles `{id, title, updated}`, the last used first. */
  async list() {
    const entries = await this.ask("readonly", (stores) => stores[ENTRIES].getAll());
    return entries.sort((a, b) => b.updated - a.updated);
  }

  /** A conversation `{id, title, created, updated, turns, chosen}`; undefined if it was deleted. */
  get(id) {
    return this.ask("readonly", (stores) => stores[CONVERSATIONS].get(id));
  }

  /** As `list`, of conversations with `query`, in lower case, in their title, messages, files or answers. */
  async find(query) {
    const matches = (text) => text.toLowerCase().includes(query);
    const inTurn = ({ user, content, files }) => [user, content, ...files.flatMap(({ name, text }) => [name, text])].some(matches);
    const found = (await this.all()).filter(({ title, turns }) => matches(title) || turns.some(inTurn));
    const ids = new Set(found.map(({ id }) => id));
    return (await this.list()).filter(({ id }) => ids.has(id));
  }

  all() {
    return this.ask("readonly", (stores) => stores[CONVERSATIONS].getAll());
  }

  put(conversation) {
    const { id, title, updated } = conversation;
    return this.ask("readwrite", (stores) => {
      stores[ENTRIES].put({ id, title, updated });
      return stores[CONVERSATIONS].put(conversation);
    });
  }

  delete(id) {
    return this.ask("readwrite", (stores) => {
      stores[ENTRIES].delete(id);
      return stores[CONVERSATIONS].delete(id);
    });
  }

  /** The result of a request, when its transaction is complete. */
  async ask(mode, make) {
    this.database ??= open();
    const transaction = (await this.database).transaction([ENTRIES, CONVERSATIONS], mode);
    return new Promise((resolve, reject) => {
      const stores = Object.fromEntries([ENTRIES, CONVERSATIONS].map((name) => [name, transaction.objectStore(name)]));
      const request = make(stores);
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error ?? request.error);
    });
  }
}

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      for (const name of [ENTRIES, CONVERSATIONS]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// Conversations as they are kept and exported, and what is checked before an exported file is believed.

import { ROOT } from "./tree.js";

const [FORMAT, VERSION] = ["runtime.conversations", 1];
export const MAX_IMPORT_BYTES = 64 * 1024 ** 2;

/**
 * A fresh turn behind `parent`: the prompt is a message with files, or the results of calls. The answer's fields are
 * filled while it comes.
 */
export function newTurn(parent, { user, files = [], results = [] }) {
  const answer = { mode: "chat", content: "", reasoning: "", calls: [], facts: "", note: "", error: "", model: "", tokens: 0 };
  return { id: randomId(), parent, user, files, results, ...answer };
}

/** Not by `randomUUID`, which browsers do not have for pages from other machines without TLS. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function writeArchive(conversations) {
  const bare = conversations.map(({ title, created, updated, turns, chosen }) => ({ title, created, updated, turns, chosen }));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: bare }, null, 1);
}

/** The conversations of an exported file, with ids of their own; throws an Error that says what is wrong with it. */
export function readArchive(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not valid JSON: ${error.message}`);
  }
  if (content?.format !== FORMAT) throw new Error(`The file has no conversations: its "format" is not "${FORMAT}".`);
  if (content.version !== VERSION) throw new Error(`The file has version ${content.version}; this page reads ${VERSION}.`);
  return list(content.conversations, "conversations").map(readConversation);
}

function readConversation({ title, created, updated, turns, chosen }) {
  const ids = new Set([ROOT]);
  const read = list(turns, "turns").map((turn) => {
    const known = readTurn(turn);
    if (!ids.has(known.parent)) throw new Error("A turn of the file follows one that is not in front of it.");
    if (ids.has(known.id)) throw new Error("Two turns of the file have the same id.");
    ids.add(known.id);
    return known;
  });
  const shown = Object.entries(chosen ?? {}).filter((pair) => pair.every((id) => ids.has(id)));
  const times = { created: Number(created) || Date.now(), updated: Number(updated) || Date.now() };
  return { id: randomId(), title: plain(title, "title"), ...times, turns: read, chosen: Object.fromEntries(shown) };
}

function readTurn(turn) {
  const known = newTurn(ROOT, { user: "" });
  for (const [name, value] of Object.entries(known)) {
    known[name] = PARTS[name] ? readParts(name, turn[name] ?? value) : plain(turn[name] ?? value, name, typeof value);
  }
  return known;
}

/** Lists in a turn, and the fields of what is in them. */
const PARTS = { files: ["name", "text"], results: ["id", "name", "content"], calls: ["id", "name", "arguments"] };

function readParts(name, value) {
  const fieldsOf = (part) => PARTS[name].map((field) => [field, plain(part?.[field], field)]);
  return list(value, name).map((part) => Object.fromEntries(fieldsOf(part)));
}

function plain(value, name, kind = "string") {
  if (typeof value === kind) return value;
  throw new Error(`"${name}" in the file must be ${kind === "string" ? "text" : "a number"}.`);
}

function list(value, name) {
  if (!Array.isArray(value)) throw new Error(`"${name}" in the file must be a list.`);
  return value;
}

// Turns as requests repeat them: messages of a conversation, or one text.

/** A message with its files in front, each in a fence that its content does not close. */
export function promptText({ user, files }) {
  return [...files.map(fenced), user].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const runs = text.match(/`+/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Messages of turns `{user, files, results, answer, calls}`. */
export function toMessages(turns, system) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    messages.push(...promptMessages(turn));
    if (turn.answer || turn.calls.length) messages.push(answerMessage(turn));
  }
  return messages;
}

function promptMessages(turn) {
  if (!turn.results.length) return [{ role: "user", content: promptText(turn) }];
  return turn.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
}

function answerMessage({ answer, calls }) {
  if (!calls.length) return { role: "assistant", content: answer };
  const described = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role: "assistant", content: answer || null, tool_calls: described };
}

/** Turns as one text that goes on. */
export function toText(turns) {
  return turns.map((turn) => promptText(turn) + turn.answer).join("");
}

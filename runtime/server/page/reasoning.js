// Reasoning that a model writes in front of its answer, between two marks.

const [OPEN, CLOSE] = ["<think>", "</think>"];

/** `{reasoning, text, isOpen}` of an answer; `isOpen`: the reasoning is not complete yet. */
export function splitReasoning(answer) {
  const text = answer.trimStart();
  if (!text.startsWith(OPEN)) return { reasoning: "", text: answer, isOpen: false };
  const end = text.indexOf(CLOSE);
  if (end < 0) return { reasoning: text.slice(OPEN.length).trim(), text: "", isOpen: true };
  return {
    reasoning: text.slice(OPEN.length, end).trim(),
    text: text.slice(end + CLOSE.length).trimStart(),
    isOpen: false,
  };
}

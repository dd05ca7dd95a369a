// Requests to the server that this page came from. The key stays in this tab.

import { toMessages, toText } from "./messages.js";

const KEY_NAME = "runtime.api-key";

export class ApiError extends Error {
  constructor(message, status = 0, param = null, code = null) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

function headers(hasBody) {
  const found = hasBody ? { "Content-Type": "application/json" } : {};
  const key = sessionStorage.getItem(KEY_NAME);
  // A header holds bytes: each one of the key's UTF-8 becomes a character.
  if (key) found.Authorization = "Bearer " + String.fromCharCode(...new TextEncoder().encode(key));
  return found;
}

/** A successful response. Every refusal is an ApiError with the server's words; an abort stays an AbortError. */
export async function request(path, { body, signal } = {}) {
  const options = { headers: headers(body !== undefined), signal, cache: "no-store" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const plain = `The server answered with status ${response.status}.`;
  const { error } = await response.json().catch(() => ({}));
  return new ApiError(error?.message ?? plain, response.status, error?.param ?? null, error?.code ?? null);
}

/** What is in order with the server: "ok", or a sentence that says what is not. */
export async function health() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    const { status, reason } = await response.json();
    return response.ok ? "ok" : `${status}: ${reason}`;
  } catch {
    return "not reachable";
  }
}

/** The objects of a stream of server-sent events, up to its end. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The connection broke before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, response.status, event.error.param);
      yield event;
    }
  }
}

/** Pieces `{text, reasoning, calls, tokens, finish, usage}` of one answer; tokens are `{text, logprob, top: [{text, logprob}]}`. */
export async function* generate({ path, body, read }, signal) {
  const response = await request(path, { body: { ...body, ...STREAMED }, signal });
  const decoder = new TextDecoder();
  try {
    for await (const { choices, usage } of events(response)) {
      const [choice] = choices;
      const piece = choice ? read(choice, decoder) : { text: "", reasoning: "", calls: [], tokens: [] };
      yield { ...piece, finish: choice?.finish_reason, usage };
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
}

const STREAMED = { stream: true, stream_options: { include_usage: true } };
const NUM_ALTERNATIVES = 8;

/** Asks for an answer to a conversation; `form` has the fields of tools and of the answer's format. */
export function chatRequest(turns, { system, sampling, form, probabilities }) {
  const logprobs = probabilities ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : {};
  const body = { ...sampling, ...form, messages: toMessages(turns, system), ...logprobs };
  return { path: "v1/chat/completions", body, read: readChat };
}

/** Asks for the continuation of turns as one text. */
export function textRequest(turns, { sampling, probabilities }) {
  const logprobs = probabilities ? { logprobs: NUM_ALTERNATIVES } : {};
  return { path: "v1/completions", body: { ...sampling, prompt: toText(turns), ...logprobs }, read: readText };
}

function readChat({ delta, logprobs }, decoder) {
  const tokens = (logprobs?.content ?? []).map(({ token, logprob, bytes, top_logprobs: top }) => ({
    // Some characters are several tokens: the last one of them gets the text.
    text: bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token,
    name: token,
    logprob,
    top: top.map((other) => ({ name: other.token, logprob: other.logprob })),
  }));
  const { content, reasoning_content: reasoning, tool_calls: calls } = delta;
  return { text: content ?? "", reasoning: reasoning ?? "", calls: calls ?? [], tokens };
}

function readText({ text, logprobs }) {
  const tokens = (logprobs?.tokens ?? []).map((name, i) => ({
    text: name,
    name,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs[i] ?? {}).map(([other, logprob]) => ({ name: other, logprob })),
  }));
  return { text, reasoning: "", calls: [], tokens };
}

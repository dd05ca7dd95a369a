// Text that grows, with a span around every token. All of it goes in as text, never as markup.

const NEAR = 8; // characters within which a token that was lost track of is found again

export class Tokens {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.unplaced = ""; // text that no token has claimed yet
    this.tokens = []; // tokens whose text has not come yet
    this.lost = false;
    this.tail = document.createTextNode("");
    this.element.append(this.tail);
  }

  /** Whether any token came with its probability. */
  get isEmpty() {
    return !this.element.querySelector(".token");
  }

  /** Text is shown at once. The server may hold it back behind its tokens, but never sends it before them. */
  add({ text, tokens }) {
    this.text += text;
    this.unplaced += text;
    this.tokens.push(...tokens);
    while (this.tokens.length && this.place(this.tokens[0])) this.tokens.shift();
    this.tail.data = this.unplaced;
  }

  /** A stop string may have cut the last token short. */
  finish() {
    const [token] = this.tokens;
    if (token && this.unplaced && token.text.startsWith(this.unplaced)) this.claim(token, this.unplaced.length);
    this.tail.data = this.unplaced;
    this.element.querySelector(".token")?.setAttribute("tabindex", "0"); // arrows lead to the others
  }

  /** Finds the token's text; false when it has not come yet. Special tokens have none and are passed over. */
  place(token) {
    if (this.unplaced.startsWith(token.text)) return this.claim(token, token.text.length);
    if (token.text.startsWith(this.unplaced)) return false;
    const bare = token.text.trimStart();
    if (bare && this.unplaced === this.text && this.unplaced.startsWith(bare)) return this.claim(token, bare.length);
    const distance = this.lost ? this.unplaced.indexOf(token.text) : -1;
    this.lost = distance < 0 || distance > NEAR;
    if (this.lost) return true;
    this.tail.before(this.take(distance));
    return this.claim(token, token.text.length);
  }

  take(length) {
    const taken = this.unplaced.slice(0, length);
    this.unplaced = this.unplaced.slice(length);
    return taken;
  }

  claim(token, length) {
    this.lost = false;
    if (!length) return true;
    const span = document.createElement("span");
    span.className = "token";
    span.tabIndex = -1;
    span.textContent = this.take(length);
    // Squared, so that only what was really in doubt stands out.
    span.style.setProperty("--doubtful", ((1 - Math.exp(token.logprob)) ** 2).toFixed(3));
    span.token = token;
    this.tail.before(span);
    return true;
  }
}

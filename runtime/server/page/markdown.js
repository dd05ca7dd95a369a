// Markdown as elements. Everything passes the sanitiser: no markup of the text itself, no images, no scripts, no styles.

import DOMPurify from "./vendor/purify.es.mjs";
import hljs from "./vendor/highlight.min.js";
import { Marked } from "./vendor/marked.esm.js";

const LINE_BREAK = /\r?\n/g;
const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (character) => escapes[character]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    // Tags that are not in a code block are text of the answer as well.
    html: ({ text, block }) => (block ? `<p>${escape(text.trim()).replace(LINE_BREAK, "<br>")}</p>` : escape(text)),
    // Nothing is loaded from elsewhere: the address could tell a secret.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
  },
});

const TEXT = ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre"];
const TABLES = ["strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const MARKDOWN = {
  ALLOWED_TAGS: [...TEXT, ...TABLES],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const HIGHLIGHTED = { ...MARKDOWN, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] };

/** Text that grows, shown as Markdown; a block (paragraph, list, code) that stays the same is not made again. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.blocks = [];
  }

  /** `settled`: no more text follows. */
  show(text, settled) {
    const wanted = parse(text, settled);
    let same = 0;
    while (same < wanted.length && this.blocks[same]?.key === wanted[same].key) same++;
    for (const { element } of this.blocks.splice(same)) element.remove();
    for (const block of wanted.slice(same)) {
      const element = renderBlock(block);
      this.blocks.push({ key: block.key, element });
      this.element.append(element);
    }
  }
}

/** Blocks `{token, key, isClosed}`. The last one may go on, so its code gets no colours before it is settled. */
function parse(text, settled) {
  const all = lex(text);
  const links = Object.keys(all.links).length ? JSON.stringify(all.links) : "";
  const tokens = all.filter(({ type }) => type !== "space" && type !== "def");
  return tokens.map((token, i) => {
    const isClosed = settled || i < tokens.length - 1 || token.type !== "code";
    return { token, isClosed, key: `${isClosed} ${token.raw} ${links}` };
  });
}

/** Text that is nested too deep for the parser becomes one paragraph. */
function lex(text) {
  try {
    return marked.lexer(text);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return Object.assign([{ type: "html", block: true, raw: text, text }], { links: {} });
  }
}

function renderBlock({ token, isClosed }) {
  const block = document.createElement("div");
  block.className = "block";
  block.append(render(token));
  for (const link of block.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const code of block.querySelectorAll("pre > code")) frameCode(code, isClosed);
  return block;
}

function render(token) {
  try {
    return DOMPurify.sanitize(marked.parser([token]), MARKDOWN);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return token.raw;
  }
}

/** A line with language and button above the code, and colours in it. */
function frameCode(code, isClosed) {
  const language = /^language-(\S+)/.exec(code.className)?.[1] ?? "";
  const [frame, bar, name, copy] = ["div", "div", "span", "button"].map((tag) => document.createElement(tag));
  [frame.className, bar.className] = ["code", "code-bar"];
  name.textContent = language || "code";
  copy.textContent = "Copy";
  Object.assign(copy, { type: "button", className: "quiet" });
  copy.dataset.action = "copy-code";
  bar.append(name, copy);
  code.parentElement.replaceWith(frame);
  code.parentElement.tabIndex = 0; // wide code is scrolled with the arrow keys
  frame.append(bar, code.parentElement);
  if (isClosed && hljs.getLanguage(language)) highlight(code, language);
}

function highlight(code, language) {
  const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, HIGHLIGHTED));
}

// The small table of what else a token could have been, for pointer, touch and keyboard.

const MARGIN = 8; // pixels to the edges

export class Alternatives {
  /** `panel` is shown over tokens inside of `area`. */
  constructor(panel, area) {
    this.panel = panel;
    this.area = area;
    this.span = null;
    const tokenOf = (event) => event.target.closest?.(".token");
    area.addEventListener("pointerover", (event) => this.show(tokenOf(event)));
    area.addEventListener("pointerleave", () => this.show(null));
    area.addEventListener("focusin", (event) => this.show(tokenOf(event)));
    area.addEventListener("focusout", () => this.show(null));
    area.addEventListener("scroll", () => this.place());
    area.addEventListener("keydown", (event) => this.move(event, tokenOf(event)));
  }

  show(span) {
    if (span === this.span) return;
    this.span?.removeAttribute("aria-describedby");
    this.span = span ?? null;
    this.panel.hidden = !span;
    if (!span) return;
    span.setAttribute("aria-describedby", this.panel.id);
    this.fill(span.token);
    this.place();
  }

  move(event, span) {
    if (event.key === "Escape") this.show(null);
    if (!span) return;
    const all = [...span.parentElement.querySelectorAll(".token")];
    const here = all.indexOf(span);
    const steps = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: all.length - 1 };
    const next = all[steps[event.key]];
    if (!next) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  fill({ name, logprob, top }) {
    const isChosen = (other) => other.name === name;
    const rows = [...top].sort((a, b) => b.logprob - a.logprob);
    if (!rows.some(isChosen)) rows.push({ name, logprob });
    const [title, table] = [this.panel.querySelector("h3"), this.panel.querySelector("tbody")];
    title.replaceChildren(element("code", visible(name)), element("span", percent(logprob)));
    table.replaceChildren(...rows.map((other) => row(other, isChosen(other))));
  }

  /** Below the token, or above it where there is no room; never beyond the area's sides. */
  place() {
    if (!this.span) return;
    const token = this.span.getClientRects()[0];
    const { offsetWidth: width, offsetHeight: height } = this.panel;
    const below = token.bottom + MARGIN;
    const top = below + height < innerHeight - MARGIN ? below : Math.max(MARGIN, token.top - MARGIN - height);
    const most = this.area.getBoundingClientRect().right - width - MARGIN;
    const left = Math.max(MARGIN, Math.min(token.left - MARGIN, most));
    this.panel.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
}

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function row({ name, logprob }, chosen) {
  const made = element("tr", "", chosen ? "chosen" : "");
  const bar = element("td", "", "bar");
  bar.style.setProperty("--share", Math.exp(logprob).toFixed(4));
  made.append(element("th", visible(name)), bar, element("td", percent(logprob), "percent"));
  return made;
}

/** Spaces and line ends as signs that can be seen. */
function visible(text) {
  return text.replaceAll(" ", "\u00b7").replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5") || "\u2205";
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
}

// Calls of tools in an answer: name and arguments, and fields for the results with which the conversation goes on.

export class Calls {
  /** `onResults` gets `[{id, name, content}]`. */
  constructor(form, template, onResults) {
    Object.assign(this, { form, template });
    this.list = form.querySelector(".list");
    this.shown = "";
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.classList.remove("reopened");
      onResults(this.results);
    });
  }

  /** Typed results stay while the calls are the same. */
  show(calls) {
    const wanted = JSON.stringify(calls);
    if (wanted === this.shown) return;
    [this.shown, this.calls] = [wanted, calls];
    this.form.hidden = !calls.length;
    this.list.replaceChildren(...calls.map((call) => this.item(call)));
  }

  item({ name, arguments: text }) {
    const item = this.template.content.firstElementChild.cloneNode(true);
    item.querySelector(".name").textContent = name;
    item.querySelector("pre").textContent = indented(text);
    item.querySelector("textarea").setAttribute("aria-label", `Result of ${name}`);
    return item;
  }

  get fields() {
    return [...this.list.querySelectorAll("textarea")];
  }

  get results() {
    const values = this.fields.map((field) => field.value);
    return this.calls.map(({ id, name }, i) => ({ id, name, content: values[i] }));
  }

  /** Leads to the first field that is empty. */
  focus() {
    const { fields } = this;
    (fields.find((field) => !field.value) ?? fields[0])?.focus();
  }

  /** Shows fields with earlier results, to send others. */
  reopen(results) {
    this.form.classList.add("reopened");
    this.fields.forEach((field, i) => {
      field.value ||= results[i]?.content ?? "";
    });
    this.fields[0]?.focus();
  }
}

/** Results in place of a message: terms and descriptions of a list. */
export function resultItems(results) {
  return results.flatMap(({ name, content }) => {
    const [term, text] = ["dt", "dd"].map((tag) => document.createElement(tag));
    [term.textContent, text.textContent] = [`Result of ${name}`, content];
    return [term, text];
  });
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // a call that was cut short
  }
}

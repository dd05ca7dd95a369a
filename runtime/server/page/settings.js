// The form beside the conversation: sampling, format of the answer, tools. Kept for as long as the tab lives.

import { ApiError } from "./api.js";
import { JsonField } from "./json_field.js";

const STORE_NAME = "runtime.settings";

export class Settings {
  constructor(form) {
    this.form = form;
    this.numbers = [...form.querySelectorAll("input[type=number]")];
    this.schema = new JsonField(form.elements.response_format, "object");
    this.tools = new JsonField(form.elements.tools, "list");
    this.defaults = this.values();
    this.restore(JSON.parse(sessionStorage.getItem(STORE_NAME) ?? "{}"));
    form.addEventListener("input", (event) => this.changed(event.target));
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      this.restore(this.defaults);
      this.changed(form);
    });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get mode() {
    return this.form.elements.mode.value;
  }

  set mode(value) {
    this.form.elements.mode.value = value;
    this.changed(this.form);
  }

  get system() {
    return this.form.elements.system.value;
  }

  values() {
    const named = ["mode", "system", "response_format", "tools", ...this.numbers.map((input) => input.name)];
    return Object.fromEntries(named.map((name) => [name, this.form.elements[name].value]));
  }

  restore(values) {
    for (const [name, value] of Object.entries(values)) this.form.elements[name].value = value;
    for (const input of this.numbers) this.slide(input);
    for (const field of [this.schema, this.tools]) field.mark(field.check().problem);
    document.body.dataset.mode = this.mode;
  }

  changed(input) {
    if (input.dataset.slides) {
      this.form.elements[input.dataset.slides].value = input.value;
      input = this.form.elements[input.dataset.slides];
    } else if (input.type === "number") {
      this.slide(input);
    }
    this.point(null);
    document.body.dataset.mode = this.mode;
    sessionStorage.setItem(STORE_NAME, JSON.stringify(this.values()));
  }

  /** Brings the slider of a number to it. */
  slide(input) {
    const slider = this.form.querySelector(`[data-slides="${input.name}"]`);
    if (slider) slider.value = input.value === "" ? input.dataset.off : input.value;
  }

  /** Shows which field the server refused, by the path of what was wrong in it. */
  point(path) {
    const fields = [...this.numbers, this.schema.element, this.tools.element];
    for (const input of this.numbers) input.toggleAttribute("aria-invalid", false);
    const found = fields.find(({ name }) => name === path?.split(/[.[]/)[0]);
    found?.setAttribute("aria-invalid", "true");
    found?.closest("details")?.setAttribute("open", "");
  }

  /** Fields of a chat about its form: a schema that answers follow, tools that they may call. */
  get fields() {
    const [schema, tools] = [this.schema.value, this.tools.value];
    const format = schema && { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    return { ...(format && { response_format: format }), ...(tools?.length && { tools }) };
  }

  /** The fields of a request. Empty ones and those that change nothing are left out; the server judges the others. */
  get sampling() {
    const found = {};
    for (const input of this.numbers) {
      const label = input.getAttribute("aria-label") ?? input.labels[0].textContent;
      if (input.validity.badInput) throw new ApiError(`${label.trim()} must be a number.`, 400, input.name);
      if (input.value !== "" && input.value !== input.dataset.off) found[input.name] = Number(input.value);
    }
    return found;
  }
}

// A field for JSON, checked when it is left and before it is sent.

import { ApiError } from "./api.js";

export class JsonField {
  /** `kind` is "object" or "list"; the field's label names it, and the element that describes it shows what is wrong. */
  constructor(element, kind) {
    Object.assign(this, { element, kind });
    this.problem = document.getElementById(element.getAttribute("aria-describedby"));
    element.addEventListener("input", () => this.mark(""));
    element.addEventListener("change", () => this.mark(this.check().problem));
  }

  /** The value; undefined for an empty field. Throws an ApiError that names the field. */
  get value() {
    const { value, problem } = this.check();
    this.mark(problem);
    if (problem) throw new ApiError(`${this.element.labels[0].textContent.trim()}: ${problem}`, 400, this.element.name);
    return value;
  }

  check() {
    const text = this.element.value.trim();
    if (!text) return { problem: "" };
    let value;
    try {
      value = JSON.parse(text);
    } catch (error) {
      return { problem: `not valid JSON: ${error.message}` };
    }
    const kind = Array.isArray(value) ? "list" : typeof value;
    return kind === this.kind && value ? { value, problem: "" } : { problem: `must be a JSON ${this.kind}` };
  }

  mark(problem) {
    this.problem.textContent = problem;
    if (problem) this.element.setAttribute("aria-invalid", "true");
    else this.element.removeAttribute("aria-invalid");
  }
}

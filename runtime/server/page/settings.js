// What the form beside the conversation says about sampling. Kept for as long as the tab lives.

import { ApiError } from "./api.js";

const STORE_NAME = "runtime.settings";

export class Settings {
  constructor(form) {
    this.form = form;
    this.numbers = [...form.querySelectorAll("input[type=number]")];
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
    const named = ["mode", "system", ...this.numbers.map((input) => input.name)];
    return Object.fromEntries(named.map((name) => [name, this.form.elements[name].value]));
  }

  restore(values) {
    for (const [name, value] of Object.entries(values)) this.form.elements[name].value = value;
    for (const input of this.numbers) this.slide(input);
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

  /** Shows which field the server refused. */
  point(name) {
    for (const input of this.numbers) input.toggleAttribute("aria-invalid", false);
    const found = this.numbers.find((input) => input.name === name);
    found?.setAttribute("aria-invalid", "true");
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

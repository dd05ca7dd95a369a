// Live figures of the engine: `/metrics` once a second while the page is seen, each figure with a small plot.

import { request } from "./api.js";

const NUM_SAMPLES = 60; // one minute, over which shares are taken too
const SPEED_SPAN = 2; // samples over which speed is taken
const [WIDTH, HEIGHT] = [120, 32];

const whole = (value) => String(Math.round(value));
const share = (value) => `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`;

/** How a figure follows from the last samples; null where there is nothing to tell. */
const FIGURES = {
  running: { format: whole, of: (all) => all.at(-1).num_requests_running },
  waiting: { format: whole, of: (all) => all.at(-1).num_requests_waiting },
  speed: { format: whole, of: speed },
  memory: { format: share, full: 1, of: (all) => all.at(-1).kv_cache_usage_perc },
  prefix: { format: share, full: 1, of: ratio("prefix_cache_hits_total", "prefix_cache_queries_total") },
  drafts: {
    format: share,
    full: 1,
    of: ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
  },
};

function speed(samples) {
  const [first, last] = [samples.at(-1 - SPEED_SPAN) ?? samples[0], samples.at(-1)];
  const seconds = (last.time - first.time) / 1000;
  return seconds ? (last.generation_tokens_total - first.generation_tokens_total) / seconds : null;
}

function ratio(part, total) {
  return (samples) => {
    const [first, last] = [samples[0], samples.at(-1)];
    const count = last[total] - first[total];
    return count > 0 ? (last[part] - first[part]) / count : null;
  };
}

/** The plain numbers of Prometheus' text format, without the names' common beginning; of several engines, sums and mean shares. */
function parse(text) {
  const found = {};
  for (const [, name, value] of text.matchAll(/^runtime_(\w+)(?:\{engine="\d+"\})? (\S+)$/gm)) {
    (found[name] ??= []).push(Number(value));
  }
  const join = (name, values) => values.reduce((sum, value) => sum + value) / (name.endsWith("_perc") ? values.length : 1);
  return Object.fromEntries(Object.entries(found).map(([name, values]) => [name, join(name, values)]));
}

class Plot {
  constructor(figure, { format, full }) {
    this.output = figure.querySelector("output");
    this.svg = figure.querySelector("svg");
    this.format = format;
    this.full = full;
    this.values = [];
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    [this.area, this.line] = ["area", "line"].map((name) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", name);
      return this.svg.appendChild(path);
    });
  }

  push(value) {
    this.values = [...this.values, value].slice(-NUM_SAMPLES);
    this.output.textContent = value === null ? "\u2013" : this.format(value);
    const top = this.full ?? Math.max(1, ...this.values);
    const start = NUM_SAMPLES - this.values.length;
    const points = this.values.map((v, i) => [((start + i) / (NUM_SAMPLES - 1)) * WIDTH, 1 + (1 - v / top) * (HEIGHT - 2)]);
    const runs = this.runs().map(([from, to]) => points.slice(from, to));
    const draw = (run) => "M" + run.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
    this.line.setAttribute("d", runs.map(draw).join(""));
    const closed = runs.map((run) => [[run[0][0], HEIGHT], ...run, [run.at(-1)[0], HEIGHT]]);
    this.area.setAttribute("d", closed.map((run) => draw(run) + "Z").join(""));
  }

  /** Borders of stretches without a gap. */
  runs() {
    const found = [];
    this.values.forEach((value, i) => {
      if (value === null) return;
      if (i && this.values[i - 1] !== null) found.at(-1)[1] = i + 1;
      else found.push([i, i + 1]);
    });
    return found;
  }
}

export class Figures {
  constructor(parent) {
    this.samples = [];
    this.plots = Object.entries(FIGURES).map(([name, figure]) => {
      return [figure, new Plot(parent.querySelector(`[data-figure="${name}"]`), figure)];
    });
  }

  /** Reads the server's figures once. */
  async update() {
    const response = await request("metrics");
    const sample = { time: performance.now(), ...parse(await response.text()) };
    this.samples = [...this.samples, sample].slice(-NUM_SAMPLES);
    for (const [figure, plot] of this.plots) plot.push(figure.of(this.samples));
  }
}

// Charts of the last 5 minutes, one point per snapshot, and the same as a table.

import { byId, element, setAttribute, setText, shape, table } from "./dom.js";
import { clock, count, duration, rate, share } from "./format.js";

const MINUTE_MS = 60 * 1000;
const SPAN_MS = 5 * MINUTE_MS;
// Seconds in which nothing ended have no latency: a line joins points that are at most this apart.
const JOIN_MS = 15000;
const ROW_MS = 15000; // what a row of the table summarizes
const HEIGHT = 132;
const MARGIN = { left: 52, right: 8, top: 8, bottom: 22 };

// `dashed`: lines differ by more than colour. The axis ends at `most`, or at `least` or above.
const PLOTS = [
  { title: "Time to first token", format: duration, series: [{ field: "ttft_p50_ms", name: "p50" }, { field: "ttft_p99_ms", name: "p99", dashed: true }] },
  { title: "Time between tokens", format: duration, series: [{ field: "itl_p50_ms", name: "p50" }, { field: "itl_p99_ms", name: "p99", dashed: true }] },
  { title: "Tokens per second", format: rate, series: [{ field: "tokens_per_s", name: "answers" }, { field: "prompt_tokens_per_s", name: "prompts", dashed: true }] },
  { title: "Requests in flight", format: count, least: 2, series: [{ field: "running", name: "with a node" }, { field: "waiting", name: "waiting", dashed: true }] },
  { title: "Prompt tokens from caches", format: share, most: 1, series: [{ field: "cache_hit_rate", name: "share" }] },
  { title: "Error of predictions", format: duration, series: [{ field: "prediction_error_p50_ms", name: "p50" }] },
];

export class Charts {
  #points = [];
  #plots = [];
  #rows;

  constructor() {
    this.#plots = PLOTS.map((plot) => new Plot(plot, () => this.#points));
    byId("plots").append(...this.#plots.map((plot) => plot.holder));
    this.#rows = historyTable();
    byId("history").addEventListener("toggle", () => this.#showTable());
  }

  add(snapshot) {
    setAttribute(byId("charts"), "hidden", !snapshot.viewer.admin);
    this.#points.push({ at: snapshot.at_ms, ...snapshot.totals, ...snapshot.latency });
    while (this.#points[0].at < snapshot.at_ms - SPAN_MS) this.#points.shift();
    for (const plot of this.#plots) plot.draw();
    this.#showTable();
  }

  clear() {
    this.#points.length = 0;
  }

  /** The latest known value of each field, of the last seconds. */
  latest() {
    const latest = {};
    const end = this.#points.at(-1)?.at ?? 0;
    for (const point of this.#points) {
      if (end - point.at > JOIN_MS) continue;
      for (const [name, value] of Object.entries(point)) if (value !== null) latest[name] = value;
    }
    return latest;
  }

  #showTable() {
    if (byId("history").open) this.#rows(summarize(this.#points));
  }
}

class Plot {
  #plot;
  #points;
  #svg = shape("svg", { role: "img", height: HEIGHT });
  #grid = shape("g", { class: "grid" });
  #cursor = shape("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  #lines;
  #values;
  #pointer = null; // x of the pointer, in pixels

  constructor(plot, points) {
    this.#plot = plot;
    this.#points = points;
    this.#lines = plot.series.map((series) => shape("path", { class: series.dashed ? "series dashed" : "series" }));
    this.#values = plot.series.map(() => element("b"));
    const legend = plot.series.map((series, place) => element("span", { class: "key" }, element("span", { class: series.dashed ? "sample dashed" : "sample", "aria-hidden": "true" }), `${series.name} `, this.#values[place]));
    this.#svg.append(this.#grid, this.#cursor, ...this.#lines);
    this.holder = element("figure", {}, element("figcaption", {}, element("h3", {}, plot.title), element("span", { class: "keys" }, ...legend)), this.#svg);
    new ResizeObserver(() => this.draw()).observe(this.holder);
    const point = (x) => {
      this.#pointer = x;
      this.draw();
    };
    this.#svg.addEventListener("pointermove", (event) => point(event.offsetX));
    this.#svg.addEventListener("pointerleave", () => point(null));
  }

  draw() {
    const width = this.holder.clientWidth;
    const points = this.#points();
    if (width === 0 || points.length === 0) return;
    const { format, series, title } = this.#plot;
    setAttribute(this.#svg, "width", width);
    setAttribute(this.#svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
    const end = points.at(-1).at;
    const most = Math.max(...points.flatMap((point) => series.map(({ field }) => Math.abs(point[field] ?? 0))));
    const negative = points.some((point) => series.some(({ field }) => point[field] < 0));
    const top = this.#plot.most ?? niceCeiling(Math.max(most, this.#plot.least ?? 0));
    const bottom = negative ? -top : 0;
    const minutes = Math.min(5, Math.max(1, Math.ceil((end - points[0].at) / MINUTE_MS)));
    const x = (at) => MARGIN.left + (1 - (end - at) / (minutes * MINUTE_MS)) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom - ((value - bottom) / (top - bottom)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.#drawGrid(width, y, [bottom, (bottom + top) / 2, top], (ago) => x(end - ago * MINUTE_MS), minutes);
    series.forEach(({ field }, place) => setAttribute(this.#lines[place], "d", path(points, field, x, y)));
    const shown = this.#pointed(points, x) ?? this.#lastKnown(points);
    series.forEach(({ field }, place) => setText(this.#values[place], format(shown[field])));
    const texts = series.map(({ field, name }) => `${name} ${format(shown[field])}`);
    setAttribute(this.#svg, "aria-label", `${title}: ${texts.join(", ")}. The table below has the last 5 minutes.`);
  }

  /** `xOf`: minutes ago -> pixels. */
  #drawGrid(width, y, levels, xOf, minutes) {
    const { format } = this.#plot;
    const rows = levels.flatMap((level) => [
      shape("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(level), y2: y(level) }),
      shape("text", { x: MARGIN.left - 6, y: y(level) + 4, class: "end" }, level === 0 ? "0" : format(level)),
    ]);
    const step = minutes === 1 ? 0.5 : minutes > 3 && width < 330 ? 2 : 1;
    const times = [];
    for (let ago = 0; ago <= minutes; ago += step) {
      const text = ago === 0 ? "now" : ago < 1 ? `−${ago * 60} s` : `−${ago} min`;
      times.push(shape("text", { x: xOf(ago), y: HEIGHT - 6, class: ago === 0 ? "end" : "middle" }, text));
    }
    this.#grid.replaceChildren(...rows, ...times);
  }

  /** The point under the pointer, and its cursor. */
  #pointed(points, x) {
    setAttribute(this.#cursor, "visibility", this.#pointer === null ? "hidden" : "visible");
    if (this.#pointer === null) return null;
    const distance = (point) => Math.abs(x(point.at) - this.#pointer);
    const nearest = points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    setAttribute(this.#cursor, "x1", x(nearest.at));
    setAttribute(this.#cursor, "x2", x(nearest.at));
    return nearest;
  }

  #lastKnown(points) {
    const last = {};
    for (const { field } of this.#plot.series) {
      last[field] = points.findLast((point) => point[field] !== null)?.[field] ?? null;
    }
    return last;
  }
}

/** A line through the known values; a value alone is a dot. */
function path(points, field, x, y) {
  let text = "";
  let last = null;
  for (const point of points) {
    const value = point[field];
    if (value === null || value === undefined) continue;
    const joins = last !== null && point.at - last <= JOIN_MS;
    text += `${joins ? "L" : "M"}${x(point.at).toFixed(1)} ${y(value).toFixed(1)}${joins ? "" : "h0"}`;
    last = point.at;
  }
  return text;
}

/** The next of 1, 2, 4, 10, 20, ... at or above the value; halves of the larger ones are whole. */
function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].find((step) => step * power >= value) * power;
}

/** Means of each 15 s, the newest first. */
function summarize(points) {
  const rows = new Map();
  for (const point of points) {
    const start = Math.floor(point.at / ROW_MS) * ROW_MS;
    if (!rows.has(start)) rows.set(start, []);
    rows.get(start).push(point);
  }
  const mean = (group, field) => {
    const known = group.map((point) => point[field]).filter((value) => value !== null && value !== undefined);
    return known.length > 0 ? known.reduce((sum, value) => sum + value) / known.length : null;
  };
  const fields = PLOTS.flatMap((plot) => plot.series.map(({ field }) => field));
  return [...rows].reverse().map(([start, group]) => ({
    start,
    ...Object.fromEntries(fields.map((field) => [field, mean(group, field)])),
  }));
}

function historyTable() {
  const columns = [{ title: "From", cell: (row) => clock(row.start) }];
  for (const { title, format, series } of PLOTS) {
    for (const { field, name } of series) {
      columns.push({ title: `${title}, ${name}`, number: true, cell: (row) => format(row[field]) });
    }
  }
  const caption = "Means of each 15 seconds";
  return table(byId("history").querySelector(".scroll"), caption, columns, (row) => row.start, "No figure yet.");
}

// The pool as a picture: router, nodes, store, and the KV that moves between them.
// A card is a node: its state as a shape and a word, its load and its KV blocks as bars.

import { byId, element, keyed, setAttribute, setText, shape, table } from "./dom.js";
import { bytes, count, MISSING, plural, rate, share } from "./format.js";

const ROUTER_HEIGHT = 44;
const HEAD_HEIGHT = 40; // of a role: its name and its rate
const CARD_GAP = 10;
const GUTTER = 20; // beside a column of cards in a narrow picture, for edges
const EDGE_LENGTH = 52; // between cards and store in a wide picture
const STORE_WIDTH = 92;
const NARROW = 640;
const MANY = 12; // nodes of a role whose cards have one line only
const WIDE_CARD = 216; // from this width on a card has rates
const LINGER_MS = 2500; // an edge stays lit: a hand-off is shorter than a snapshot's second
const CHARACTER = 7.4; // average width of one, in pixels
const MIN_BUSY = 8; // a load bar is full at this number of requests, or at the busiest node's

const ROLES = { prefill: "Prefill", decode: "Decode" };
// Shapes in a square of 10 around 0, by state.
const MARKS = {
  ready: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
  starting: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0zM-3 0a3 3 0 1 1 6 0a3 3 0 1 1 -6 0z",
  draining: "M-5 -4h10l-5 9z",
  asleep: "M1.5 -5a5 5 0 1 0 3.5 7a4.4 4.4 0 0 1 -3.5 -7z",
  stalled: "M-4.5 -4.5h9v9h-9z",
  lost: "M-5 -3.4l1.6 -1.6l3.4 3.4l3.4 -3.4l1.6 1.6l-3.4 3.4l3.4 3.4l-1.6 1.6l-3.4 -3.4l-3.4 3.4l-1.6 -1.6l3.4 -3.4z",
};
const UNKNOWN_MARK = "M0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z";

const stateOf = (node) => (node.asleep ? "asleep" : node.state);
const hasFigures = (node) => node.running !== null;
const usedShare = (node) => (node.total_blocks ? 1 - node.free_blocks / node.total_blocks : null);
const cachedShare = (node) => (node.total_blocks ? node.cached_blocks / node.total_blocks : null);

export class Picture {
  #holder = byId("picture");
  #edges = shape("g");
  #cards = shape("g");
  #heads = shape("g");
  #router = shape("g", { class: "router" }, shape("rect", { rx: 8 }), shape("text", { class: "name", x: 16, y: 27 }), shape("text", { class: "small end", y: 27 }));
  #store = shape("g", { class: "store" }, shape("rect", { rx: 8 }), shape("text", { class: "name" }), shape("text", { class: "small" }), shape("text", { class: "small" }), shape("rect", { class: "track", rx: 2, height: 5 }), shape("rect", { class: "used", rx: 2, height: 5 }));
  #svg = shape("svg", { role: "img" }, this.#edges, this.#router, this.#store, this.#heads, this.#cards);
  #lit = new Map(); // edge -> when KV moved on it last
  #last = null;
  #nodes;

  constructor() {
    this.#holder.append(this.#svg);
    new ResizeObserver(() => this.#last && this.#draw(...this.#last)).observe(this.#holder);
    this.#nodes = nodeTable();
    byId("nodes").addEventListener("toggle", () => this.#last && this.#nodes(this.#last[0].nodes));
    showLegend();
  }

  /** `store`: the store's record in /pool, null if unknown. */
  show(snapshot, store) {
    this.#last = [snapshot, store];
    this.#draw(snapshot, store);
    if (byId("nodes").open) this.#nodes(snapshot.nodes);
  }

  #draw(snapshot, store) {
    const width = this.#holder.clientWidth;
    if (width === 0) return;
    const plan = width < NARROW ? narrowPlan(snapshot, width) : widePlan(snapshot, width);
    for (const [name, value] of [["width", width], ["height", plan.height], ["viewBox", `0 0 ${width} ${plan.height}`]]) {
      setAttribute(this.#svg, name, value);
    }
    setAttribute(this.#svg, "aria-label", summary(snapshot, store));
    drawRouter(this.#router, snapshot, width);
    drawStore(this.#store, store, plan.store, snapshot);
    keyed(this.#heads, plan.heads, (head) => head.role, makeHead, updateHead);
    keyed(this.#cards, plan.cards, (card) => card.node.id, makeCard, updateCard);
    keyed(this.#edges, this.#activeEdges(snapshot, plan), (edge) => edge.key, makeEdge, updateEdge);
  }

  #activeEdges(snapshot, plan) {
    const moving = movingKv(snapshot);
    for (const key of moving.keys()) this.#lit.set(key, snapshot.at_ms);
    for (const [key, at] of this.#lit) {
      if (snapshot.at_ms - at > LINGER_MS) this.#lit.delete(key);
    }
    return plan.edges.map((edge) => ({ ...edge, lit: this.#lit.has(edge.key), size: moving.get(edge.key) ?? 0 }))
      .filter((edge) => edge.lit || edge.usual);
  }
}

/** Bytes per second on each edge, by "NODE out" and "NODE in"; also edges of running hand-offs. */
function movingKv(snapshot) {
  const moving = new Map();
  for (const flow of snapshot.flows) {
    moving.set(`${flow.source} out`, 0);
    moving.set(`${flow.target} in`, 0);
  }
  for (const node of snapshot.nodes) {
    if (node.kv_out_bytes_per_s > 0) moving.set(`${node.id} out`, node.kv_out_bytes_per_s);
    if (node.kv_in_bytes_per_s > 0) moving.set(`${node.id} in`, node.kv_in_bytes_per_s);
  }
  return moving;
}

function ofRole(snapshot, role) {
  return snapshot.nodes.filter((node) => node.role === role);
}

function cardHeight(nodes) {
  return nodes.length > MANY || !nodes.some(hasFigures) ? 34 : 90;
}

function heads(snapshot) {
  return Object.keys(ROLES).map((role) => {
    const nodes = ofRole(snapshot, role);
    const ready = nodes.filter((node) => node.state === "ready").length;
    const tokens = role === "prefill" ? snapshot.totals.prompt_tokens_per_s : snapshot.totals.tokens_per_s;
    const what = role === "prefill" ? "prompt tokens/s" : "tokens/s";
    return {
      role,
      title: ROLES[role],
      ready: nodes.length === 0 ? "no node" : `${ready} of ${nodes.length} ready`,
      flow: tokens === null ? "" : `${rate(tokens)} ${what}`,
    };
  });
}

function widePlan(snapshot, width) {
  const side = (width - STORE_WIDTH) / 2 - EDGE_LENGTH;
  const top = ROUTER_HEIGHT + HEAD_HEIGHT;
  const cards = [];
  const edges = [];
  let height = 96;
  for (const role of Object.keys(ROLES)) {
    const nodes = ofRole(snapshot, role);
    const columns = nodes.length > 4 && side > 330 ? 2 : 1;
    const size = { w: (side - CARD_GAP * (columns - 1)) / columns, h: cardHeight(nodes) };
    const left = role === "prefill" ? 0 : width - side;
    nodes.forEach((node, place) => {
      // The first column is the one beside the store.
      const column = place % columns;
      const inner = role === "prefill" ? columns - 1 - column : column;
      const x = left + inner * (size.w + CARD_GAP);
      const y = top + Math.floor(place / columns) * (size.h + CARD_GAP);
      cards.push({ node, x, y, ...size, busiest: busiest(snapshot) });
      height = Math.max(height, y + size.h - top);
      edges.push(...wideEdges(node, { x, y, ...size }, column > 0, width));
    });
  }
  const [prefill, decode] = heads(snapshot);
  return {
    cards,
    edges,
    store: { x: (width - STORE_WIDTH) / 2, y: top, w: STORE_WIDTH, h: height },
    heads: [
      { ...prefill, x: 0, y: ROUTER_HEIGHT, w: side, arrow: "down" },
      { ...decode, x: width - side, y: ROUTER_HEIGHT, w: side, arrow: "up" },
    ],
    height: top + height + 2,
  };
}

/** A node's edges: a straight line to the store; from the outer column below the inner cards. */
function wideEdges(node, card, outer, width) {
  const prefill = node.role === "prefill";
  const storeX = width / 2 + (prefill ? -STORE_WIDTH / 2 : STORE_WIDTH / 2);
  const line = (direction, usual) => {
    const offset = usual ? 0 : 10;
    const cardX = prefill ? card.x + card.w : card.x;
    const middle = card.y + card.h / 2 + offset;
    const below = card.y + card.h + CARD_GAP / 2;
    const corner = prefill ? card.x + card.w - 14 : card.x + 14;
    const points = outer ? [[corner, card.y + card.h], [corner, below], [storeX, below]] : [[cardX, middle], [storeX, middle]];
    return { key: `${node.id} ${direction}`, role: node.role, usual, path: route(points, direction === "in") };
  };
  return [line("out", prefill), line("in", !prefill)];
}

function narrowPlan(snapshot, width) {
  const cards = [];
  const edges = [];
  const placed = [];
  let y = ROUTER_HEIGHT;
  let store;
  for (const head of heads(snapshot)) {
    placed.push({ ...head, x: 0, y, w: width - GUTTER, arrow: null });
    y += HEAD_HEIGHT;
    const nodes = ofRole(snapshot, head.role);
    const columns = nodes.length > 4 ? 2 : 1;
    const size = { w: width / columns - GUTTER, h: cardHeight(nodes) };
    const first = y;
    nodes.forEach((node, place) => {
      const x = (place % columns) * (width / columns);
      const cardY = first + Math.floor(place / columns) * (size.h + CARD_GAP);
      cards.push({ node, x, y: cardY, ...size, busiest: busiest(snapshot) });
      y = cardY + size.h;
    });
    if (head.role === "prefill") {
      store = { x: 0, y: y + 24, w: width - GUTTER, h: 46 };
      y = store.y + store.h;
    }
  }
  for (const card of cards) edges.push(...narrowEdges(card, store));
  return { cards, edges, store, heads: placed, height: y + 2 };
}

function narrowEdges(card, store) {
  const prefill = card.node.role === "prefill";
  const line = (direction, usual) => {
    const middle = card.y + card.h / 2 + (usual ? 0 : 10);
    const lane = Math.min(card.x + card.w + (usual ? 9 : 14), store.x + store.w - 10);
    const start = card.x + card.w;
    const end = prefill ? store.y : store.y + store.h;
    const points = lane > start
      ? [[start, middle], [lane, middle], [lane, end]]
      : [[start, middle], [start + 10, middle], [start + 10, end + (prefill ? 20 : -20)], [store.x + store.w, end + (prefill ? 20 : -20)]];
    return { key: `${card.node.id} ${direction}`, role: card.node.role, usual, path: route(points, direction === "in") };
  };
  return [line("out", prefill), line("in", !prefill)];
}

/** A path over these points, or backwards. */
function route(points, backwards) {
  const order = backwards ? [...points].reverse() : points;
  return order.map(([x, y], place) => `${place === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function busiest(snapshot) {
  return Math.max(MIN_BUSY, ...snapshot.nodes.map((node) => (node.running ?? 0) + (node.waiting ?? 0)));
}

function drawRouter(group, snapshot, width) {
  const [box, name, load] = group.children;
  setAttribute(box, "width", width - 1);
  setAttribute(box, "height", ROUTER_HEIGHT - 1);
  setAttribute(box, "x", 0.5);
  setAttribute(box, "y", 0.5);
  setText(name, width < NARROW ? "Router" : `Router ${snapshot.router}`);
  setAttribute(load, "x", width - 16);
  const { running, waiting } = snapshot.totals;
  setText(load, `${plural(running + waiting, "request")} in flight`);
}

function drawStore(group, store, place, snapshot) {
  const [box, name, first, second, track, used] = group.children;
  for (const [key, value] of [["x", place.x + 0.5], ["y", place.y + 0.5], ["width", place.w - 1], ["height", place.h - 1]]) {
    setAttribute(box, key, value);
  }
  const without = store !== null && !store.configured;
  const down = store !== null && store.reachable === false;
  setAttribute(group, "data-state", without ? "none" : down ? "lost" : "ready");
  const middle = place.x + place.w / 2;
  const wide = place.h > 60;
  const x = wide ? middle : place.x + 16;
  const centre = place.y + place.h / 2;
  const limit = sum(store, "limit_bytes");
  const filled = sum(store, "used_bytes");
  const part = limit > 0 ? filled / limit : null;
  setText(name, without ? "No store" : "Store");
  setText(first, without ? "" : down ? "no answer" : store === null ? "" : bytes(filled));
  setText(second, part === null || down ? "" : `of ${bytes(limit)}`);
  for (const text of [name, first, second]) setAttribute(text, "text-anchor", wide ? "middle" : "start");
  setAttribute(name, "x", x);
  setAttribute(first, "x", wide ? middle : x + 56);
  setAttribute(second, "x", wide ? middle : x + 56 + 8.2 * String(first.textContent).length);
  setAttribute(name, "y", wide ? centre - 14 : centre + 5);
  setAttribute(first, "y", wide ? centre + 6 : centre + 5);
  setAttribute(second, "y", wide ? centre + 22 : centre + 5);
  const length = wide ? place.w - 28 : 80;
  const left = wide ? place.x + 14 : place.x + place.w - 96;
  for (const bar of [track, used]) {
    setAttribute(bar, "x", left);
    setAttribute(bar, "y", wide ? centre + 32 : centre - 2);
    setAttribute(bar, "visibility", part === null || down ? "hidden" : "visible");
  }
  setAttribute(track, "width", length);
  setAttribute(used, "width", (part ?? 0) * length);
}

function sum(store, field) {
  return (store?.instances ?? []).reduce((total, instance) => total + instance[field], 0);
}

function makeHead(head) {
  const title = shape("text", { y: 26 }, shape("tspan", { class: "role" }), shape("tspan", { class: "small", dx: 8 }));
  return shape("g", { class: `head ${head.role}` }, title, shape("path", { class: "arrow" }), shape("text", { class: "small end", y: 26 }));
}

function updateHead(group, head) {
  setAttribute(group, "transform", `translate(${head.x} ${head.y})`);
  const [title, arrow, flow] = group.children;
  setText(title.firstChild, head.title);
  setText(title.lastChild, head.ready);
  const middle = head.w - 14;
  setAttribute(arrow, "d", head.arrow === null ? "M0 0" : head.arrow === "down" ? `M${middle} 3V30m-4 -5l4 5l4 -5` : `M${middle} 32V5m-4 5l4 -5l4 5`);
  setText(flow, head.flow);
  setAttribute(flow, "x", head.w - (head.arrow === null ? 0 : 26));
}

function makeCard(card) {
  const line = (y) => [
    shape("text", { class: "small", x: 14, y }), shape("text", { class: "small end", y }),
    shape("rect", { class: "track", x: 14, y: y + 6, height: 5, rx: 2 }),
    shape("rect", { class: "used", x: 14, y: y + 6, height: 5, rx: 2 }),
    shape("rect", { class: "cached", y: y + 6, height: 5, rx: 2 }),
  ];
  const group = shape("g", {}, shape("title"), shape("rect", { class: "card", x: 0.5, y: 0.5, rx: 8 }),
    shape("rect", { class: "strip", x: 0.5, y: 8, width: 3, rx: 1.5 }), shape("path", { class: "mark" }),
    shape("text", { class: "name", x: 30 }), shape("text", { class: "small end state" }));
  group.lines = [line(43), line(70)];
  group.append(...group.lines.flat());
  return group;
}

function updateCard(group, { node, x, y, w, h, busiest: most }) {
  const state = stateOf(node);
  setAttribute(group, "transform", `translate(${x.toFixed(1)} ${y})`);
  setAttribute(group, "class", `node ${node.role}`);
  setAttribute(group, "data-state", state);
  const [title, box, strip, mark, name, word] = group.children;
  setText(title, node.reason ? `${node.id}: ${state}, ${node.reason}` : `${node.id}: ${state}`);
  setAttribute(box, "width", w - 1);
  setAttribute(box, "height", h - 1);
  setAttribute(strip, "height", h - 16);
  const middle = h < 40 ? h / 2 : 19;
  setAttribute(mark, "d", MARKS[state] ?? UNKNOWN_MARK);
  setAttribute(mark, "transform", `translate(19 ${middle})`);
  setAttribute(name, "y", middle + 4.5);
  setAttribute(word, "y", middle + 4);
  setAttribute(word, "x", w - 12);
  const full = h > 40;
  const brief = full || !hasFigures(node) ? state : `${state}, ${count(node.running + node.waiting)}`;
  setText(word, brief);
  setText(name, ending(node.id, (w - 48) / CHARACTER - brief.length));
  const shown = full && hasFigures(node);
  for (const part of group.lines.flat()) setAttribute(part, "visibility", shown ? "visible" : "hidden");
  if (!shown) return;
  const load = node.running + node.waiting;
  const rates = w >= WIDE_CARD;
  const used = usedShare(node) ?? 0;
  const cached = cachedShare(node) ?? 0;
  const moved = (node.kv_in_bytes_per_s ?? 0) + (node.kv_out_bytes_per_s ?? 0);
  drawLine(group.lines[0], w, {
    text: `${count(node.running)} running, ${count(node.waiting)} waiting`,
    rate: rates && node.tokens_per_s > 0 ? `${rate(node.tokens_per_s)} tokens/s` : "",
    used: load / most,
    cached: 0,
  });
  const blocks = rates ? `KV ${share(used)} used, ${share(cached)} cached` : `KV ${share(used)}, ${share(cached)} cached`;
  drawLine(group.lines[1], w, {
    text: state !== "ready" && node.reason ? cut(node.reason, (w - 28) / (CHARACTER - 1)) : blocks,
    rate: rates && moved > 0 && state === "ready" ? `${bytes(moved)}/s` : "",
    used,
    cached,
  });
}

function drawLine([text, end, track, used, cached], w, line) {
  const length = w - 28;
  setText(text, line.text);
  setText(end, line.rate);
  setAttribute(end, "x", w - 14);
  setAttribute(track, "width", length);
  setAttribute(used, "width", Math.min(1, line.used) * length);
  setAttribute(cached, "x", 14 + line.used * length);
  setAttribute(cached, "width", Math.max(0, Math.min(1 - line.used, line.cached)) * length);
}

/** A name with its beginning replaced by an ellipsis if it is longer: names differ at their ends. */
function ending(name, length) {
  const most = Math.max(4, Math.floor(length));
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

/** The text, with its end replaced by an ellipsis if it is longer. */
function cut(text, length) {
  const most = Math.max(4, Math.floor(length));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function makeEdge(edge) {
  return shape("g", { class: `edge ${edge.role}` }, shape("path", { class: "line" }), shape("path", { class: "moving" }));
}

function updateEdge(group, edge) {
  setAttribute(group, "data-lit", edge.lit ? "yes" : "no");
  for (const path of group.children) setAttribute(path, "d", edge.path);
  group.lastChild.style.strokeWidth = `${2 + Math.min(3, Math.max(0, Math.log10(edge.size / 1e5 || 1)))}px`;
}

function summary(snapshot, store) {
  const { totals } = snapshot;
  const flows = snapshot.flows.map((flow) => `from ${flow.source} to ${flow.target}`);
  const kept = store === null ? "" : store.configured ? ", a store" : ", no store";
  const moving = flows.length > 0 ? ` KV moves ${flows.join(", ")}.` : "";
  return `A router${kept} and ${plural(totals.nodes, "node")}, of which ${count(totals.ready_nodes)} ready.${moving} The table below has the same.`;
}

function showLegend() {
  const mark = (state) => shape("svg", { class: "node", "data-state": state, viewBox: "-6 -6 12 12", width: 12, height: 12, "aria-hidden": "true" }, shape("path", { class: "mark", d: MARKS[state] }));
  const swatch = (name) => element("span", { class: `swatch ${name}`, "aria-hidden": "true" });
  byId("legend").append(
    ...Object.keys(MARKS).map((state) => element("li", {}, mark(state), state)),
    element("li", {}, swatch("used"), "load, KV in use"),
    element("li", {}, swatch("cached"), "KV cached"),
    element("li", {}, swatch("moving"), "KV moves"),
  );
}

function nodeTable() {
  const percent = (value) => (value === null ? MISSING : share(value));
  const number = (title, cell) => ({ title, number: true, cell });
  const columns = [
    { title: "Node", cell: (node) => node.id },
    { title: "Role", cell: (node) => node.role },
    { title: "State", cell: (node) => (node.reason ? `${stateOf(node)}: ${node.reason}` : stateOf(node)) },
  ];
  const figures = [
    number("Running", (node) => count(node.running)),
    number("Waiting", (node) => count(node.waiting)),
    number("Tokens/s", (node) => rate(node.tokens_per_s)),
    number("KV in use", (node) => percent(usedShare(node))),
    number("KV cached", (node) => percent(cachedShare(node))),
    number("KV in/s", (node) => bytes(node.kv_in_bytes_per_s)),
    number("KV out/s", (node) => bytes(node.kv_out_bytes_per_s)),
  ];
  const update = table(byId("nodes").querySelector(".scroll"), "Nodes of the pool", columns, (node) => node.id, "The pool has no node.");
  return (nodes) => update(nodes, nodes.some(hasFigures) ? [...columns, ...figures] : columns);
}

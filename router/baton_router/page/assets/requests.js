// Requests in flight by phase, and those that ended lately. The button in a row explains it.

import { byId, element, keyed, setAttribute, setText, table } from "./dom.js";
import { count, duration, plural, shortId } from "./format.js";

const KEPT = 50; // ended requests
// The phases in their order -> what a reader sees.
const PHASES = {
  held: "held back",
  waiting: "waiting for a node",
  handoff: "prefill and hand-off",
  running: "generating",
  over: "ending",
};

export const phaseText = (phase) => PHASES[phase] ?? phase;

/** "prefill-0 → decode-1". */
export function nodesText(prefill, decode) {
  return [prefill, decode].filter((node) => node !== null && node !== undefined).join(" → ") || "–";
}

export class Requests {
  #ended = [];
  #running;
  #recent;
  #columns;

  /** `explain(id, button)` opens the explanation. */
  constructor(explain) {
    const number = (title, cell) => ({ title, number: true, cell });
    const id = { title: "Request", make: (request) => idButton(request, explain) };
    const tenant = { title: "Tenant", cell: (request) => request.tenant, ofAdmin: true };
    const route = { title: "Route", cell: (request) => request.endpoint };
    const nodes = { title: "Nodes", cell: (request) => nodesText(request.prefill, request.decode) };
    const attempts = number("Attempts", (request) => count(request.attempts));
    const running = [
      id, tenant,
      { title: "Phase", cell: (request) => phaseText(request.phase) },
      nodes,
      number("Age", (request) => duration(request.age_ms)),
      number("Prompt", (request) => count(request.prompt_tokens)),
      number("Cached", (request) => count(request.cached_tokens)),
      number("Tokens", (request) => count(request.completion_tokens)),
      attempts, route,
    ];
    const ended = [
      id, tenant,
      { title: "Result", update: updateResult },
      nodes,
      number("First token", (request) => duration(request.first_token_ms)),
      number("In all", (request) => duration(request.total_ms)),
      number("Prompt", (request) => count(request.prompt_tokens)),
      number("Tokens", (request) => count(request.completion_tokens)),
      attempts, route,
    ];
    this.#columns = { running, ended };
    const holder = (section) => byId(section).querySelector(".scroll");
    this.#running = table(holder("running"), "Requests in flight, the oldest first", running, (request) => request.id, "No request is in flight.");
    this.#recent = table(holder("ended"), "Requests that ended, the newest first", ended, (request) => request.id, "No request has ended since this page was opened.");
  }

  show(snapshot) {
    const known = new Set(this.#ended.map((request) => request.id));
    const fresh = snapshot.ended.filter((request) => !known.has(request.id));
    this.#ended = [...fresh.reverse(), ...this.#ended].slice(0, KEPT);
    const named = snapshot.viewer.admin && [...snapshot.requests, ...this.#ended].some((request) => request.tenant !== "");
    const visible = (columns) => columns.filter((column) => named || !column.ofAdmin);
    this.#running(snapshot.requests, visible(this.#columns.running));
    // Rows do not move away from a pointer that is about to press one.
    const pointed = byId("ended").querySelector(".scroll").matches(":hover");
    setAttribute(byId("ended-paused"), "hidden", !pointed);
    if (!pointed) this.#recent(this.#ended, visible(this.#columns.ended));
    showPhases(snapshot);
    const left = snapshot.requests_left_out;
    setAttribute(byId("left-out"), "hidden", left === 0);
    setText(byId("left-out"), `and ${plural(left, "younger request")}`);
  }

  clear() {
    this.#ended = [];
  }
}

function idButton(request, explain) {
  const button = element("button", {
    type: "button", class: "link", title: request.id,
    "aria-label": `Explain request ${request.id}`, "data-request": request.id,
  }, shortId(request.id));
  button.addEventListener("click", () => explain(request.id, button));
  return button;
}

function updateResult(cell, request) {
  const failed = request.status >= 400 && request.status !== 499;
  const text = request.status === 499 ? "client left" : failed ? `${request.status} ${request.error ?? ""}`.trim() : "done";
  setAttribute(cell, "data-result", failed ? "failed" : request.status === 499 ? "left" : "done");
  setText(cell, text);
}

function showPhases(snapshot) {
  const counts = new Map();
  for (const request of snapshot.requests) counts.set(request.phase, (counts.get(request.phase) ?? 0) + 1);
  const phases = Object.keys(PHASES).filter((phase) => counts.has(phase));
  const make = (phase) => element("li", { "data-phase": phase }, element("b"), ` ${phaseText(phase)}`);
  keyed(byId("phases"), phases, (phase) => phase, make, (item, phase) => setText(item.firstChild, count(counts.get(phase))));
}

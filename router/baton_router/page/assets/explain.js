// Why a request ran where it ran: the dialog, and the sentences that the chat also shows.

import { call, problem } from "./access.js";
import { byId, element, setText, shape, table } from "./dom.js";
import { count, duration, MISSING, plural } from "./format.js";
import { nodesText } from "./requests.js";

// A placement's reason -> what it means (docs/reason-codes.md has the conditions).
const REASONS = {
  split: "A prefill node computes the prompt, as the hand-off is worth its cost.",
  always: "A prefill node computes the prompt, as the router always splits.",
  never: "One node does all, as the router never splits.",
  short: "One node does all, as there is little to compute.",
  costly: "One node does all, as the hand-off would cost too much.",
  no_prefill: "One node does all, as no prefill node is ready.",
  no_decode: "A prefill node does all, as no decode node is ready.",
  store_down: "One node does all, as no pair of nodes can use the store.",
  resumed: "One node continues the answer: the client has its first part.",
  prompt_logprobs: "One node does all, as the request wants the prompt's log-probabilities.",
  no_cache: "One node does all, as the request must not read caches.",
  pooling: "One node does all, as the answer is a vector.",
};
// Why an attempt ended before its answer did -> what happened to the node.
const CAUSES = {
  link: "was lost",
  pings: "no longer answered",
  stalled: "stalled",
  restarted: "was restarted",
  refused: "refused the request",
  drained: "was drained",
  gap: "left a gap in its tokens",
};
// Ends that are no failures of a node.
const OWN_ENDS = { done: "ended with its last token", failed: "ended with an error", left: "ended as the client left" };
const PARTS = [
  ["Predicted", "predicted_ms"], ["Queue", "queue_ms"], ["Compute", "compute_ms"],
  ["Fetch", "fetch_ms"], ["Slows others", "slowdown_ms"],
];

/** The explanation of a request. Throws an Error with the router's message. */
export async function explanationOf(id, signal) {
  const response = await call(`requests/${encodeURIComponent(id)}`, { signal });
  if (!response.ok) throw new Error(await problem(response));
  return response.json();
}

/** A sentence for each time that another node took over. */
export function takeovers(explanation, complete) {
  const kept = complete ? ": no token lost" : "";
  return explanation.requests.flatMap(({ attempts }) => attempts.flatMap((attempt, place) => {
    const before = attempts[place - 1];
    const sentences = [];
    if (before?.ended && before.ended.why in CAUSES) {
      const lost = `${before.ended.node ?? before.decode} ${CAUSES[before.ended.why]}`;
      sentences.push(before.first_token_ms === null
        ? `Placed again on ${attempt.decode} after ${lost}, before the first token${kept}.`
        : `Continued on ${attempt.decode} after ${lost}${kept}.`);
    }
    if (attempt.prefill_given_up_at_ms !== null && attempt.prefill !== null) {
      sentences.push(`${attempt.decode} computed the prompt itself, as ${attempt.prefill} did not deliver it${kept}.`);
    }
    return sentences;
  }));
}

export class ExplanationDialog {
  #dialog = byId("explanation");
  #opener = null;
  #abort = null;

  constructor() {
    byId("close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("close", () => this.#closed());
    // A click beside the dialog closes it.
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close();
    });
  }

  async open(id, opener) {
    this.#opener = opener;
    this.#abort?.abort();
    this.#abort = new AbortController();
    const body = byId("explanation-body");
    setText(byId("explanation-title"), `Request ${id}`);
    body.replaceChildren(element("p", { class: "muted" }, "Asking the router"));
    if (!this.#dialog.open) this.#dialog.showModal();
    byId("explanation-title").focus();
    try {
      const explanation = await explanationOf(id, this.#abort.signal);
      body.replaceChildren(...view(explanation));
      if (explanation.state === "running") body.prepend(this.#refresh(id));
    } catch (error) {
      if (error.name !== "AbortError") body.replaceChildren(element("p", { role: "alert", class: "problem" }, error.message));
    }
  }

  #refresh(id) {
    const button = element("button", { type: "button" }, "Look again");
    button.addEventListener("click", () => this.open(id, this.#opener));
    return element("p", { class: "line" }, element("span", { class: "muted" }, "The request is still running."), button);
  }

  /** Focus what opened the dialog. Its row may have moved to the table of ended requests. */
  #closed() {
    this.#abort?.abort();
    const opener = this.#opener;
    const moved = [...document.querySelectorAll("[data-request]")].find((button) => button.dataset.request === opener?.dataset.request);
    (opener?.isConnected ? opener : moved ?? byId("running-title")).focus();
  }
}

function* view(call) {
  yield facts([
    ["Route", call.endpoint], ["Model", call.model], ["Tenant", call.tenant],
    ["Came", new Date(call.came * 1000).toLocaleString("en-GB")],
    ["Result", resultText(call)],
    ["First token", duration(call.first_token_ms)],
    ["In all", duration(call.total_ms)],
    ["Prompt", `${plural(call.prompt_tokens, "token")}, ${count(call.cached_tokens)} from caches`],
    ["Answer", plural(call.completion_tokens, "token")],
    ["Exact", call.exact], ["Held back", call.held], ["Client's id", call.client_request_id],
  ]);
  for (const sentence of takeovers(call, call.status === 200)) yield element("p", { class: "takeover" }, sentence);
  for (const request of call.requests) {
    if (call.requests.length > 1) yield element("h3", {}, `Prompt ${request.id}`);
    yield timeline(call, request);
    for (const attempt of request.attempts) yield attemptView(attempt);
    if (request.attempts_left_out > 0) yield element("p", { class: "muted" }, `${plural(request.attempts_left_out, "attempt")} in between left out.`);
  }
  if (call.requests_left_out > 0) yield element("p", { class: "muted" }, `and ${plural(call.requests_left_out, "more prompt")}`);
}

function resultText(call) {
  if (call.status === null || call.status === undefined) return "running";
  const error = call.error ? `, ${call.error}` : "";
  return call.status === 499 ? "the client left" : `${call.status}${error}`;
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== MISSING);
  return element("dl", { class: "facts" }, ...known.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/** Waits and attempts on one axis of time, as bars with their text. */
function timeline(call, request) {
  const total = Math.max(call.total_ms ?? 0, 1);
  const waits = request.waits.map((wait) => ({ at: wait.at_ms, ms: wait.ms, kind: "wait", text: `waited: ${wait.why}` }));
  const attempts = request.attempts.map((attempt) => {
    const until = attempt.ended ? attempt.ended.at_ms : total;
    return { at: attempt.at_ms, ms: until - attempt.at_ms, kind: "attempt", text: nodesText(attempt.prefill, attempt.decode), first: attempt.first_token_ms };
  });
  const rows = [...waits, ...attempts].sort((one, other) => one.at - other.at);
  return element("ol", { class: "timeline", "aria-label": "Waits and attempts in their order" }, ...rows.map((row) => timelineRow(row, total)));
}

function timelineRow(row, total) {
  const at = (100 * row.at) / total;
  const bar = shape("svg", { "aria-hidden": "true", height: 14, width: "100%" },
    shape("rect", { class: "track", width: "100%", height: 14, rx: 3 }),
    shape("rect", { class: row.kind, x: `${at}%`, width: `${Math.max(0.4, (100 * row.ms) / total)}%`, height: 14, rx: 3 }));
  if (row.first !== null && row.first !== undefined) {
    bar.append(shape("rect", { class: "first", x: `${(100 * (row.at + row.first)) / total}%`, width: 2, height: 14 }));
  }
  const first = row.first !== null && row.first !== undefined ? `, first token ${duration(row.at + row.first)}` : "";
  return element("li", {}, element("span", {}, row.text), element("span", { class: "muted" }, `${duration(row.at)} to ${duration(row.at + row.ms)}${first}`), bar);
}

function attemptView(attempt) {
  const holder = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Nodes considered for attempt ${attempt.attempt}` });
  const chosen = (option) => option.decode === attempt.decode && option.prefill === attempt.prefill;
  const considered = table(holder, "Considered, the cheapest first", [
    { title: "", cell: (option) => (chosen(option) ? "chosen" : "") },
    { title: "Nodes", cell: (option) => nodesText(option.prefill, option.decode) },
    ...PARTS.map(([title, field]) => ({ title, number: true, cell: (option) => duration(option[field]) })),
    { title: "Cached", number: true, cell: (option) => plural(option.cached_tokens, "token") },
  ], (option) => `${option.decode} ${option.prefill}`, "No alternative was considered.");
  considered(attempt.considered);
  return element("section", { class: "attempt" },
    element("h3", {}, `Attempt ${attempt.attempt}: ${nodesText(attempt.prefill, attempt.decode)}`),
    element("p", {}, REASONS[attempt.reason] ?? attempt.reason),
    element("p", { class: "muted" }, attempt.explanation),
    holder,
    element("ul", {}, ...attemptSentences(attempt).map((text) => element("li", {}, text))));
}

function attemptSentences(attempt) {
  const { known } = attempt;
  const sentences = [
    `Known: the store ${known.store_up ? "answers" : "does not answer"} and has ${count(known.stored_chunks)} of the prompt's ${plural(known.chunks, "chunk")}.`,
    attempt.decoding_ms === null
      ? `Predicted ${duration(attempt.expected_ms)} until ${attempt.decode} decodes; it has sent no token.`
      : `Predicted ${duration(attempt.expected_ms)} until ${attempt.decode} decodes, measured ${duration(attempt.decoding_ms)}.`,
  ];
  const fetched = attempt.fetch_or_compute;
  if (fetched !== null && fetched.did !== "nothing to fetch") {
    sentences.push(`Of what the store has, the node ${fetched.did}: ${plural(fetched.fetched_tokens, "token")} in ${duration(fetched.fetch_ms)}.`);
  }
  for (const stats of attempt.measured) {
    const waited = stats.handoff_ms > 0 ? `waited ${duration(stats.handoff_ms)} for the prefill node, ` : "";
    sentences.push(`${stats.node}: ${waited}queue ${duration(stats.queue_ms)}, fetch ${duration(stats.fetch_ms)}, prefill ${duration(stats.prefill_ms)}; ${plural(stats.cached_tokens, "prompt token")} cached, ${count(stats.fetched_tokens)} fetched, ${count(stats.computed_tokens)} computed.`);
  }
  if (attempt.ended) {
    const what = OWN_ENDS[attempt.ended.why] ?? `ended: ${attempt.ended.node ?? attempt.decode} ${CAUSES[attempt.ended.why] ?? attempt.ended.why}`;
    sentences.push(`At ${duration(attempt.ended.at_ms)} it ${what}.`);
  }
  return sentences;
}

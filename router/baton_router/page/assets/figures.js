// The figures of the last second, in one row. A figure that the viewer may not see is left out.

import { byId, element, keyed, setText } from "./dom.js";
import { count, duration, rate, share } from "./format.js";

const known = (value) => value !== null && value !== undefined;

export function showFigures(snapshot, seen) {
  const { totals } = snapshot;
  const figures = [
    ["nodes ready", totals.ready_nodes, `${count(totals.ready_nodes)} of ${count(totals.nodes)}`],
    ["with a node", totals.running, count(totals.running)],
    ["waiting", totals.waiting, count(totals.waiting)],
    ["requests/s", totals.requests_per_s, rate(totals.requests_per_s)],
    ["tokens/s", totals.tokens_per_s, rate(totals.tokens_per_s)],
    ["errors/s", totals.errors_per_s, rate(totals.errors_per_s)],
    ["TTFT p50", seen.ttft_p50_ms, duration(seen.ttft_p50_ms)],
    ["ITL p50", seen.itl_p50_ms, duration(seen.itl_p50_ms)],
    ["cache hits", seen.cache_hit_rate, share(seen.cache_hit_rate)],
  ].filter(([, value]) => known(value));
  const make = ([name]) => element("div", {}, element("dt", {}, name), element("dd"));
  keyed(byId("figures"), figures, ([name]) => name, make, (group, [, , text]) => {
    setText(group.lastChild, text);
  });
}

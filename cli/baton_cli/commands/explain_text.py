"""Formats a router's explanation of a request: nodes considered, decisions, predictions, results.

In: the JSON of GET /requests/{id}. Out: lines of text. Any other JSON raises KeyError or TypeError.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]

COLUMNS = ("", "DECODE", "PREFILL", "PREDICTED", "QUEUE", "COMPUTE", "FETCH", "SLOWDOWN", "CACHED")
PARTS = ("predicted_ms", "queue_ms", "compute_ms", "fetch_ms", "slowdown_ms")


def lines_of(call: Json) -> Iterator[str]:
    whose = f", tenant {call['tenant']}" if call["tenant"] else ""
    yield f"{call['id']}: {call['endpoint']}, {call['model'] or 'no model'}{whose}"
    if call.get("client_request_id"):
        yield f"  its client calls it {call['client_request_id']!r}"
    yield f"  {_outcome(call)}"
    yield (
        f"  {call['prompt_tokens']} prompt tokens ({call['cached_tokens']} cached),"
        f" {call['completion_tokens']} completion tokens"
    )
    if call["held"]:
        yield f"  held before it was prepared: {call['held']}"
    if call["prepared_ms"] is not None:
        yield f"  ready to be placed after {_ms(call['prepared_ms'])}"
    for request in call["requests"]:
        if len(call["requests"]) > 1 or request["id"] != call["id"]:
            yield f"{request['id']}: {request['state']}"
        yield from _request(request)
    if call["requests_left_out"]:
        yield f"and {call['requests_left_out']} more prompts"


def _outcome(call: Json) -> str:
    came = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(call["came"]))
    end = f"status {call['status']}" if call["status"] is not None else "it runs"
    error = f" ({call['error']})" if call["error"] else ""
    first = call["first_token_ms"]
    token = f", first token after {_ms(first)}" if first is not None else ""
    return f"came {came}{token}, {end}{error} after {_ms(call['total_ms'])}"


def _request(request: Json) -> Iterator[str]:
    """Yield the waits and attempts in the order in which they began."""
    entries = [(wait["at_ms"], _wait(wait)) for wait in request["waits"]]
    entries += [(one["at_ms"], list(_attempt(one))) for one in request["attempts"]]
    for _, lines in sorted(entries, key=lambda item: item[0]):
        yield from lines
    if request["attempts_left_out"]:
        yield f"  {request['attempts_left_out']} attempts in between are not kept"


def _wait(wait: Json) -> list[str]:
    return [f"  at {_ms(wait['at_ms'])}: waited {_ms(wait['ms'])}: {wait['why']}"]


def _attempt(one: Json) -> Iterator[str]:
    prefill = f"prefill {one['prefill']}, " if one["prefill"] else ""
    number, at = one["attempt"], _ms(one["at_ms"])
    yield f"  at {at}: attempt {number}: {prefill}decode {one['decode']} ({one['reason']})"
    yield f"    {one['explanation']}"
    known = one["known"]
    store = "up" if known["store_up"] else "down"
    yield f"    known: store {store}, it holds {known['stored_chunks']} of {known['chunks']} chunks"
    yield from _table(one)
    yield f"    {_measured(one)}"
    if one["first_token_ms"] is not None and one["first_token_ms"] != one["decoding_ms"]:
        yield f"    its client's first token after {_ms(one['first_token_ms'])}"
    if one["fetch_or_compute"] is not None:
        yield f"    {_fetching(one['fetch_or_compute'])}"
    for stats in one["measured"]:
        yield f"    {_stats(stats)}"
    if one["prefill_given_up_at_ms"] is not None:
        yield f"    at {_ms(one['prefill_given_up_at_ms'])}: the prefill node was given up"
    if (ended := one["ended"]) is not None:
        node = f" ({ended['node']})" if ended["node"] else ""
        yield f"    at {_ms(ended['at_ms'])}: ended: {ended['why']}{node}"


def _table(one: Json) -> Iterator[str]:
    """Yield a table of the placements considered, in milliseconds; a star marks the chosen one."""
    if not one["considered"]:
        return
    rows = [COLUMNS]
    for way in one["considered"]:
        pair = (way["decode"], way["prefill"])
        star = "*" if pair == (one["decode"], one["prefill"]) else ""
        figures = [f"{way[part]:.1f}" for part in PARTS]
        rows.append((star, way["decode"], way["prefill"] or "-", *figures, _cached(way)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "    " + _row(row, widths).rstrip()


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Align the three name columns to the left, the figures to the right."""
    padded = [
        cell.ljust(width) if place < 3 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded)


def _cached(way: Json) -> str:
    return f"{way['cached_tokens']} tokens"


def _measured(one: Json) -> str:
    text = f"predicted {_ms(one['predicted_ms'])}"
    if one["expected_ms"] != one["predicted_ms"]:
        text += f", {_ms(one['expected_ms'])} of it until {one['decode']} decodes"
    if one["decoding_ms"] is None:
        return f"{text}; {one['decode']} has sent no token"
    return f"{text}; measured {_ms(one['decoding_ms'])}, {one['error_ms']:+.1f} ms"


def _fetching(did: Json) -> str:
    if did["did"] == "nothing to fetch":
        return "fetch or compute: nothing to fetch"
    ways = (
        f"predicted: fetch {_ms(did['fetch_predicted_ms'])},"
        f" compute {_ms(did['compute_predicted_ms'])}"
    )
    tokens = f"{did['fetched_tokens']} tokens fetched in {_ms(did['fetch_ms'])}"
    return f"fetch or compute: {did['did']}; {ways}; {tokens}, {did['declined_tokens']} left"


def _stats(stats: Json) -> str:
    partner = ""
    if stats["handoff_ms"]:
        partner = f"waited for the prefill node {_ms(stats['handoff_ms'])}, "
    return (
        f"{stats['node']}: {partner}queue {_ms(stats['queue_ms'])}, fetch {_ms(stats['fetch_ms'])},"
        f" prefill {_ms(stats['prefill_ms'])}; {stats['cached_tokens']} tokens cached,"
        f" {stats['host_tokens']} from its host tier, {stats['fetched_tokens']} fetched,"
        f" {stats['computed_tokens']} computed"
    )


def _ms(value: float) -> str:
    return f"{value:.1f} ms"

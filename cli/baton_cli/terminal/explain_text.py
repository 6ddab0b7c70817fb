"""A router's explanation of a request: nodes considered, decisions, predictions, results.

In: a router, a request's id. Out: the JSON of GET /requests/{id}, and lines of text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from baton_cli.errors import CommandError
from baton_cli.terminal.remote_router import RemoteRouter
from baton_cli.terminal.text import align, visible_line

Json = dict[str, Any]

COLUMNS = ("", "DECODE", "PREFILL", "PREDICTED", "QUEUE", "COMPUTE", "FETCH", "SLOWDOWN", "CACHED")
PARTS = ("predicted_ms", "queue_ms", "compute_ms", "fetch_ms", "slowdown_ms")


def find_explanation(router: RemoteRouter, request_id: str) -> Json:
    """Raise CommandError with the router's message if it has none."""
    return router.ask(f"/requests/{quote(request_id, safe='')}")


def explanation_lines(call: Json) -> list[str]:
    """The explanation as text. Raise CommandError if the JSON is none."""
    try:
        return [visible_line(line) for line in lines_of(call)]
    except (KeyError, TypeError) as error:
        raise CommandError(
            f"the router did not answer with an explanation ({error!r}); check that it is a router"
            " of this version"
        ) from error


def lines_of(call: Json) -> Iterator[str]:
    """Raise KeyError or TypeError for other JSON than an explanation."""
    whose = f", tenant {call['tenant']}" if call["tenant"] else ""
    yield f"{call['id']}: {call['endpoint']}, {call['model'] or 'no model'}{whose}"
    if call.get("client_request_id"):
        yield f"  client request id {call['client_request_id']!r}"
    yield f"  {_format_outcome(call)}"
    yield (
        f"  {call['prompt_tokens']} prompt tokens ({call['cached_tokens']} cached),"
        f" {call['completion_tokens']} completion tokens"
    )
    if call["exact"]:
        yield f"  exact: {call['exact']}"
    if call["held"]:
        yield f"  held before it was prepared: {call['held']}"
    if call["prepared_ms"] is not None:
        yield f"  ready to be placed after {_ms(call['prepared_ms'])}"
    for request in call["requests"]:
        if len(call["requests"]) > 1 or request["id"] != call["id"]:
            yield f"{request['id']}: {request['state']}"
        yield from _request_lines(request)
    if call["requests_left_out"]:
        yield f"and {call['requests_left_out']} more prompts"


def _format_outcome(call: Json) -> str:
    came = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(call["came"]))
    end = f"status {call['status']}" if call["status"] is not None else "running"
    error = f" ({call['error']})" if call["error"] else ""
    first = call["first_token_ms"]
    token = f", first token after {_ms(first)}" if first is not None else ""
    return f"came {came}{token}, {end}{error} after {_ms(call['total_ms'])}"


def _request_lines(request: Json) -> Iterator[str]:
    """Yield the waits and attempts in the order in which they began, and what became of drafts."""
    entries = [(wait["at_ms"], _wait_lines(wait)) for wait in request["waits"]]
    entries += [
        (attempt["at_ms"], list(_attempt_lines(attempt))) for attempt in request["attempts"]
    ]
    for _, lines in sorted(entries, key=lambda item: item[0]):
        yield from lines
    if request["attempts_left_out"]:
        yield f"  {request['attempts_left_out']} attempts in between were dropped"
    if any(spent := request.get("spent", {}).values()):
        causes = ("prefill", "decode", "again after a loss", "again after an eviction")
        parts = [f"{name} {_ms(ms)}" for name, ms in zip(causes, spent, strict=True) if ms]
        yield f"  time of the nodes: {', '.join(parts)}"
    if (drafts := request["drafts"])["drafted"]:
        yield (
            f"  {drafts['accepted']} of {drafts['drafted']} drafts right, of which a grammar forced"
            f" {drafts['forced']}"
        )


def _wait_lines(wait: Json) -> list[str]:
    return [f"  at {_ms(wait['at_ms'])}: waited {_ms(wait['ms'])}: {wait['why']}"]


def _attempt_lines(attempt: Json) -> Iterator[str]:
    prefill = f"prefill {attempt['prefill']}, " if attempt["prefill"] else ""
    number, at = attempt["attempt"], _ms(attempt["at_ms"])
    yield f"  at {at}: attempt {number}: {prefill}decode {attempt['decode']} ({attempt['reason']})"
    yield f"    {attempt['explanation']}"
    index = attempt["known"]
    store = "up" if index["store_up"] else "down"
    yield f"    known: store {store}, it holds {index['stored_chunks']} of {index['chunks']} chunks"
    yield from _table_lines(attempt)
    yield f"    {_format_measured(attempt)}"
    if (
        attempt["first_token_ms"] is not None
        and attempt["first_token_ms"] != attempt["decoding_ms"]
    ):
        yield f"    client's first token after {_ms(attempt['first_token_ms'])}"
    if attempt["fetch_or_compute"] is not None:
        yield f"    {_format_fetch(attempt['fetch_or_compute'])}"
    for stats in attempt["measured"]:
        yield f"    {_format_stats(stats)}"
    if attempt["prefill_given_up_at_ms"] is not None:
        yield f"    at {_ms(attempt['prefill_given_up_at_ms'])}: gave up the prefill node"
    if (ended := attempt["ended"]) is not None:
        node = f" ({ended['node']})" if ended["node"] else ""
        yield f"    at {_ms(ended['at_ms'])}: ended: {ended['why']}{node}"


def _table_lines(attempt: Json) -> Iterator[str]:
    """Yield a table of the placements considered, in milliseconds; a star marks the chosen one."""
    if not attempt["considered"]:
        return
    rows = [COLUMNS]
    for option in attempt["considered"]:
        pair = (option["decode"], option["prefill"])
        star = "*" if pair == (attempt["decode"], attempt["prefill"]) else ""
        figures = [f"{option[part]:.1f}" for part in PARTS]
        rows.append(
            (star, option["decode"], option["prefill"] or "-", *figures, _format_cached(option))
        )
    for line in align(rows, names=3):
        yield f"    {line}"


def _format_cached(option: Json) -> str:
    return f"{option['cached_tokens']} tokens"


def _format_measured(attempt: Json) -> str:
    text = f"predicted {_ms(attempt['predicted_ms'])}"
    if attempt["expected_ms"] != attempt["predicted_ms"]:
        text += f", of which {_ms(attempt['expected_ms'])} until {attempt['decode']} decodes"
    if attempt["decoding_ms"] is None:
        return f"{text}; {attempt['decode']} has sent no token"
    return f"{text}; measured {_ms(attempt['decoding_ms'])}, {attempt['error_ms']:+.1f} ms"


def _format_fetch(fetch: Json) -> str:
    if fetch["did"] == "nothing to fetch":
        return "fetch or compute: nothing to fetch"
    predicted = (
        f"predicted: fetch {_ms(fetch['fetch_predicted_ms'])},"
        f" compute {_ms(fetch['compute_predicted_ms'])}"
    )
    tokens = f"{fetch['fetched_tokens']} tokens fetched in {_ms(fetch['fetch_ms'])}"
    return (
        f"fetch or compute: {fetch['did']}; {predicted}; {tokens}, {fetch['declined_tokens']} left"
    )


def _format_stats(stats: Json) -> str:
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

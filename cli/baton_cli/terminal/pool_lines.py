"""A snapshot of a pool as lines: totals, nodes, requests, tenants.

In: a Snapshot of GET /pool/events, an order of the requests. Out: lines; headings are marked. A
figure that the viewer may not see is "-". Names come from clients and nodes, so their control
characters are escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from baton_cli.terminal.text import align, visible_line
from baton_router.live.records import LiveNode, RunningCall, Snapshot

NODE_HEAD = (
    *("NODE", "ROLE", "STATE", "EXACT", "RUN", "WAIT", "KV USED", "CACHED", "TOKENS/S"),
    *("KV IN/S", "KV OUT/S"),
)
NODE_NAMES = 4
CALL_HEAD = (
    *("TENANT", "ENDPOINT", "PHASE", "PREFILL", "DECODE", "AGE", "PROMPT", "CACHED", "NEW"),
    *("TRIES", "ID"),
)
CALL_NAMES = 5
TENANT_HEAD = ("TENANT", "RUN", "WAIT")
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


class Line(NamedTuple):
    text: str
    heading: bool = False


class Order(NamedTuple):
    """An order of the requests. `reverse`: the largest first."""

    name: str
    key: Callable[[RunningCall], float | str]
    reverse: bool = True


# By the key that chooses it.
ORDERS = {
    "a": Order("age", lambda call: call.age_ms),
    "p": Order("prompt", lambda call: call.prompt_tokens),
    "n": Order("new tokens", lambda call: call.completion_tokens),
    "t": Order("tenant", lambda call: call.tenant, reverse=False),
}


def pool_lines(snapshot: Snapshot, order: Order, reverse: bool = False) -> list[Line]:
    """All of the snapshot. `reverse` turns the order around."""
    lines = [Line(text) for text in _summary(snapshot)]
    nodes = sorted(snapshot.nodes, key=lambda node: (node.role != "prefill", node.id))
    lines += _table(NODE_HEAD, map(_node_cells, nodes), NODE_NAMES)
    calls = sorted(snapshot.requests, key=order.key, reverse=order.reverse != reverse)
    if calls:
        lines += _table(CALL_HEAD, map(_call_cells, calls), CALL_NAMES)
    if snapshot.requests_left_out:
        lines.append(Line(f"and {snapshot.requests_left_out} more requests"))
    if any(tenant.name for tenant in snapshot.tenants):
        rows = (
            (tenant.name, str(tenant.running), str(tenant.waiting)) for tenant in snapshot.tenants
        )
        lines += _table(TENANT_HEAD, rows, names=1)
    return lines


def _summary(snapshot: Snapshot) -> Iterator[str]:
    totals, latency = snapshot.totals, snapshot.latency
    clock = time.strftime("%H:%M:%S UTC", time.gmtime(snapshot.at_ms / 1000))
    model = snapshot.model or "no model yet"
    yield visible_line(f"pool {snapshot.pool}, {model}, router {snapshot.router}, {clock}")
    yield (
        f"nodes: {totals.ready_nodes} of {totals.nodes} ready; requests: {totals.running} running,"
        f" {totals.waiting} waiting, {_count(totals.requests_per_s)}/s; errors:"
        f" {_count(totals.errors_per_s)}/s"
    )
    yield (
        f"tokens: {_count(totals.tokens_per_s)}/s; prompt tokens:"
        f" {_count(totals.prompt_tokens_per_s)}/s, cached {_share(latency.cache_hit_rate)}"
    )
    yield (
        f"first token: p50 {_ms(latency.ttft_p50_ms)}, p99 {_ms(latency.ttft_p99_ms)}; between"
        f" tokens: p50 {_ms(latency.itl_p50_ms)}, p99 {_ms(latency.itl_p99_ms)}"
    )
    for decision in snapshot.decisions[:1]:
        yield visible_line(
            f"planner: {decision.prefill} prefill, {decision.decode} decode: {decision.reason}"
        )


def _table(head: Sequence[str], rows: Iterator[Sequence[str]], names: int) -> list[Line]:
    """The table after an empty line."""
    cells = [[visible_line(cell) for cell in row] for row in rows]
    heading, *lines = align([head, *cells], names)
    return [Line(""), Line(heading, heading=True), *map(Line, lines)]


def _node_cells(node: LiveNode) -> tuple[str, ...]:
    state = f"{node.state} ({node.reason})" if node.reason else node.state
    return (
        node.id,
        node.role,
        state,
        node.exact or "-",
        _count(node.running),
        _count(node.waiting),
        _part(node.free_blocks, node.total_blocks, used=True),
        _part(node.cached_blocks, node.total_blocks),
        _count(node.tokens_per_s),
        _bytes(node.kv_in_bytes_per_s),
        _bytes(node.kv_out_bytes_per_s),
    )


def _call_cells(call: RunningCall) -> tuple[str, ...]:
    return (
        call.tenant or "-",
        call.endpoint,
        call.phase,
        call.prefill or "-",
        call.decode or "-",
        f"{call.age_ms / 1000:.1f} s",
        str(call.prompt_tokens),
        str(call.cached_tokens),
        str(call.completion_tokens),
        str(call.attempts),
        call.id,
    )


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _part(blocks: int | None, total: int | None, used: bool = False) -> str:
    if blocks is None or not total:
        return "-"
    return _share((total - blocks if used else blocks) / total)


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, letter in UNITS:
        if value >= unit:
            return f"{value / unit:.1f} {letter}B"
    return f"{value:.0f} B"

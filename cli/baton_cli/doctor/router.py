"""A running router and its nodes: whether a request would be served, and why nodes are not used.

In: the router's URL and a key. Out: findings, from its routes /version, /ready?all=1 and /pool, and
from the nodes that this machine reaches.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

import msgspec

from baton_cli.commands.version import DISTRIBUTION, installed_version
from baton_cli.doctor.bandwidth import break_even
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_cli.doctor.side_by_side import Work, run_side_by_side
from baton_cli.doctor.web_client import ANSWER_S, FAILURES, Version, WebClient
from baton_protocol.link import ARTIFACTS_PATH, is_loopback
from baton_router.http.pool_records import Pool, PoolNode

CHECK = "router"
LATE_S = 0.5
# A digest that no artifact has: a node without a token answers 404, one with a token 401.
NO_ARTIFACT = f"{ARTIFACTS_PATH}{'0' * 64}"
ALIKE = "--model, --dtype, --quantization, --block-size, --chunk-blocks and --kv-shards"
_REMEDIES = {
    "starting": "wait until it has loaded its model; its log says what it does",
    "draining": "resume it, if it shall serve again",
    "lost": "see whether its process and its network are there",
    "stalled": "its engine makes no step: see its log, or end it",
    "missing": "start it, or take it out of --expect-nodes",
    "unused": "give the two nodes different names (--node)",
    "unreachable": "see whether it runs, and whether the router reaches its --address",
}


# The answers of any version: unknown fields are left out.
class _LateNode(msgspec.Struct):
    node: str | None
    address: str | None
    state: str
    reason: str


class _Readiness(msgspec.Struct):
    reason: str
    not_ready: list[_LateNode] = []


def check_router(url: str, key: str, host: Host) -> Iterator[Finding]:
    web = WebClient(url, key, ANSWER_S * host.patience)
    try:
        if not (yield from _version(web)):
            return
        yield from _readiness(web)
        yield from _pool(web)
    except FAILURES as error:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"no router answers at {url}: {getattr(error, 'reason', None) or error}",
            why="clients get no answer",
            remedy="correct the URL, or start one: baton router --help",
        )


def _version(web: WebClient) -> Generator[Finding, None, bool]:
    """Return whether it is a router."""
    _, body = web.get("/version")
    try:
        theirs = msgspec.json.decode(body, type=Version).version
    except msgspec.DecodeError:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"{web.url} is not a Baton router: /version answers {body[:60]!r}",
            why="something else listens there",
            remedy="give the router's URL",
        )
        return False
    ours = installed_version(DISTRIBUTION)
    same = theirs == ours
    yield Finding(
        check=CHECK,
        severity="ok" if same else "note",
        found=f"{web.url} is a router of version {theirs}" + ("" if same else f"; this is {ours}"),
        why="" if same else "neighbouring versions work together, older ones may not",
        remedy="" if same else "upgrade the older one",
    )
    return True


def _readiness(web: WebClient) -> Iterator[Finding]:
    readiness = msgspec.json.decode(web.get("/ready?all=1")[1], type=_Readiness)
    late = readiness.not_ready
    status, body = web.get("/ready")
    if status != 200:
        reason = msgspec.json.decode(body, type=_Readiness).reason
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"no request is served: {reason}",
            why="clients wait, and then get 503",
            remedy="see the nodes below" if late else "start nodes: baton decode --help",
        )
    else:
        yield Finding(check=CHECK, severity="ok", found="requests are served")
    yield from map(_late, late)


def _late(node: _LateNode) -> Finding:
    name = node.node or node.address
    reason, _, remedy = node.reason.rpartition("; ")
    because = f": {reason or remedy}" if node.reason else ""
    return Finding(
        check=CHECK,
        severity="warning",
        found=f"node {name} is {node.state}{because}",
        why="it takes no requests",
        remedy=remedy if reason else _REMEDIES.get(node.state, "see its log"),
    )


def _pool(web: WebClient) -> Iterator[Finding]:
    status, body = web.get("/pool")
    if status in (401, 403):
        message = json.loads(body)["error"]["message"]
        refused = "the key" if web.key else "a request without a key"
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"the router refuses {refused}: {message}",
            why="its nodes cannot be checked without /pool",
            remedy="give an admin's key or the link token in the variable BATON_API_KEY",
        )
        return
    pool = msgspec.json.decode(body, type=Pool)
    yield Finding(
        check=CHECK,
        severity="ok",
        found=f"pool {pool.pool}: {len(pool.nodes)} nodes of {pool.model or 'no model'}",
    )
    for node in pool.nodes:
        yield from _node(node)
    yield from _pool_store(pool)
    yield from _link_tokens(pool.nodes, web.timeout_s)


def _node(node: PoolNode) -> Iterator[Finding]:
    if node.differs:
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"node {node.id} is of another kind than the rest: {', '.join(node.differs)}",
            why="nodes of different kinds exchange no KV, and no stream moves between them",
            remedy=f"start it with the others' {ALIKE}",
        )
    speeds = node.speeds
    if node.in_use and speeds.get_bytes_per_s and speeds.prefill_tokens_per_s:
        moved = f"node {node.id}: get {speeds.get_bytes_per_s / 1e9:.2f} GB/s"
        computed = speeds.prefill_tokens_per_s
        yield break_even(moved, speeds.get_bytes_per_s, node.layout, computed)


def _pool_store(pool: Pool) -> Iterator[Finding]:
    if pool.store.configured and pool.store.reachable is False:
        yield Finding(
            check=CHECK,
            severity="error",
            found="the router does not reach the index",
            why="it finds no new nodes and no stored KV, and decode nodes work alone",
            remedy="check the index from the router's machine:",
            commands=("baton doctor --index URL",),
        )
    for number, instance in enumerate(pool.store.instances):
        for node, trouble in (instance.put_trouble | instance.trouble).items():
            yield Finding(
                check=CHECK,
                severity="warning",
                found=f"node {node} cannot use data server {number}: {trouble}",
                why="chunks there are computed again",
                remedy="check the servers from the node's machine:",
                commands=("baton doctor --index URL --data URL",),
            )


def _link_tokens(nodes: Sequence[PoolNode], timeout_s: float) -> Iterator[Finding]:
    """Nodes that accept requests without a link token. Those that this machine does not reach are
    left out."""
    works = [
        Work(node.id, partial(_is_open, node, timeout_s), timeout_s + LATE_S) for node in nodes
    ]
    answers = [outcome.results for outcome in run_side_by_side(works)]
    known = {node.id: seen[0] for node, seen in zip(nodes, answers, strict=True) if seen}
    others_need_one = False in known.values()
    for node in nodes:
        here = is_loopback(urlsplit(node.address).hostname or "")
        if known.get(node.id) and (others_need_one or not here):
            yield Finding(
                check=CHECK,
                severity="warning",
                found=f"node {node.id} at {node.address} requires no link token",
                why="anyone who reaches it can run requests, drain it and read its tokenizer",
                remedy="start it with the pool's token, in the variable BATON_LINK_TOKEN",
            )


def _is_open(node: PoolNode, timeout_s: float) -> Iterator[bool]:
    yield WebClient(node.address, "", timeout_s).get(NO_ARTIFACT)[0] == 404

"""One page out of several workers' pages. Pure.

In: the page of the worker that was asked, and its siblings' by name. Out: for /metrics the workers'
own figures with a label `worker`; what is said of nodes is the same in all, and is the asked one's.
For /pool sums of what each does itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Json = dict[str, Any]
# Families that count what one process does; all others are its nodes' figures.
OWN = ("baton_router_", "baton_asyncio_", "process_", "python_")


def gathered_metrics(name: str, page: bytes, others: Mapping[str, bytes]) -> bytes:
    """Prometheus' text format: the samples of a family stand together, below its HELP and TYPE."""
    families: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in sorted({name: page, **others}.items()):
        for family, line in _lines(text.decode()):
            own = family.startswith(OWN)
            if not own and worker != name:
                continue
            if line.startswith("#"):
                heads = families.setdefault(family, [])
                heads += [line] if line not in heads else []
            else:
                samples.setdefault(family, []).append(_labelled(line, worker) if own else line)
    lines = [line for each in families for line in (*families[each], *samples.get(each, ()))]
    return "".join(f"{line}\n" for line in lines).encode()


def gathered_pool(name: str, pool: Json, others: Mapping[str, Any]) -> Json:
    """Bookings and running requests are each worker's own; what siblings have booked is no others'
    load any more."""
    everyone = {name: pool, **others}
    running = {worker: each["totals"]["requests_running"] for worker, each in everyone.items()}
    return pool | {
        "nodes": [_node(node, others.values()) for node in pool["nodes"]],
        "totals": pool["totals"] | {"requests_running": sum(running.values())},
        "workers": [
            {"worker": worker, "requests_running": running[worker]} for worker in sorted(running)
        ],
    }


def _node(node: Json, others: Any) -> Json:
    theirs = [
        each["booked"] for pool in others for each in pool["nodes"] if each["id"] == node["id"]
    ]
    booked = {
        key: value + sum(each[key] for each in theirs) for key, value in node["booked"].items()
    }
    rest = {
        key: max(0, value - sum(each[key] for each in theirs))
        for key, value in node["others"].items()
    }
    return node | {"booked": booked, "others": rest}


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the family it belongs to."""
    family = ""
    for line in text.splitlines():
        if line.startswith("# "):
            family = line.split(" ", 3)[2]
        if line:
            yield family, line


def _labelled(line: str, worker: str) -> str:
    label = f'worker="{worker}"'
    metric, brace, rest = line.partition("{")
    if brace and " " not in metric:
        return f"{metric}{{{label},{rest}"
    metric, _, value = line.partition(" ")
    return f"{metric}{{{label}}} {value}"

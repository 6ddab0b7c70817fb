"""Merges the pages of several workers into one. Pure.

In: the page of the worker that was asked, and its siblings' pages by name. Out: for /metrics, each
worker's own figures with the label `worker`, and the nodes' figures once, from the asked worker.
For /pool, sums of what each worker does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Json = dict[str, Any]
# Prefixes of metrics about one process; all other metrics are the nodes' figures.
OWN = ("baton_router_", "baton_asyncio_", "process_", "python_")


def merge_metrics(name: str, page: bytes, others: Mapping[str, bytes]) -> bytes:
    """Merge pages in Prometheus' text format; a family's samples follow its HELP and TYPE."""
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
    lines = [line for family in families for line in (*families[family], *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines).encode()


def merge_pools(name: str, pool: Json, others: Mapping[str, Any]) -> Json:
    """Merge /pool. Bookings and running requests are summed over the workers. The siblings'
    bookings no longer count as the load of others."""
    pools = {name: pool, **others}
    running = {
        worker: worker_pool["totals"]["requests_running"] for worker, worker_pool in pools.items()
    }
    return pool | {
        "nodes": [_node(node, others.values()) for node in pool["nodes"]],
        "totals": pool["totals"] | {"requests_running": sum(running.values())},
        "workers": [
            {"worker": worker, "requests_running": running[worker]} for worker in sorted(running)
        ],
    }


def _node(node: Json, others: Any) -> Json:
    sibling_bookings = [
        each["booked"] for pool in others for each in pool["nodes"] if each["id"] == node["id"]
    ]
    booked = {
        key: value + sum(each[key] for each in sibling_bookings)
        for key, value in node["booked"].items()
    }
    others_load = {
        key: max(0, value - sum(each[key] for each in sibling_bookings))
        for key, value in node["others"].items()
    }
    return node | {"booked": booked, "others": others_load}


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line of a metrics page with its family."""
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

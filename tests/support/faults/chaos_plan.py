"""Plans the faults of a chaos run, as a pure function of its seed.

In: a seed, a duration, the names of nodes and data servers. Out: faults in order of time. A fault
starts every few seconds, and sometimes hits all decode nodes at once. Otherwise, while a decode
node is hit, the others are mostly spared. The store has one fault at a time, of a server or its
link, and mostly of a single data server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Each kind of fault with its relative frequency and its longest duration in seconds. Links can be
# slow, stalled, cut or lossy.
NODE_FAULTS: tuple[tuple[str, int, float], ...] = (
    ("kill", 6, 1.0),  # restarted afterwards
    ("kill engine", 2, 1.0),
    ("freeze", 4, 6.0),
    ("freeze engine", 2, 6.0),
    ("break", 2, 4.0),
    ("blip", 2, 0.0),
    ("hold", 2, 6.0),
)
STORE_FAULTS: tuple[tuple[str, int, float], ...] = (
    ("kill", 3, 0.0),
    ("freeze", 1, 3.0),
    ("fill", 2, 3.0),
    ("take away", 1, 3.0),
    ("slow link", 2, 4.0),
    ("stall link", 2, 4.0),
    ("cut link", 2, 3.0),
    ("lossy link", 2, 4.0),
)
ALL_DECODE = "all decode"
FIRST_S = 1.5
GAP_S = (1.2, 3.0)
STORE_SHARE = 0.35
ALL_SHARE = 0.08
SECOND_DECODE_SHARE = 0.2  # chance that another decode node may be hit while one is
RECOVERY_S = 2.5  # from the end of a fault until its node may be hit again


@dataclass(frozen=True)
class Fault:
    """One fault; times are in seconds. `what` is a node's name, ALL_DECODE, "index", a data
    server's name, "data" for all data servers, or "both" for the whole store."""

    at: float
    what: str
    how: str
    lasts: float

    def __str__(self) -> str:
        return f"{self.how} {self.what} for {self.lasts:.1f} s"


def make_plan(
    seed: int, duration_s: float, nodes: Sequence[str], data: Sequence[str]
) -> tuple[Fault, ...]:
    """Plan faults that start in [FIRST_S, duration_s)."""
    rng = random.Random(f"chaos {seed}")
    busy = dict.fromkeys((*nodes, "store"), 0.0)
    faults: list[Fault] = []
    now = FIRST_S
    while now < duration_s:
        hit = _choose(rng, now, busy, data)
        if hit is not None:
            what, how, most = hit
            lasts = round(rng.uniform(0.2, 1.0) * most, 2)
            for name in _hit_by(what, nodes):
                busy[name] = now + lasts + RECOVERY_S
            faults.append(Fault(round(now, 2), what, how, lasts))
        now += rng.uniform(*GAP_S)
    return tuple(faults)


def _hit_by(what: str, nodes: Sequence[str]) -> list[str]:
    if what == ALL_DECODE:
        return [name for name in nodes if name.startswith("decode")]
    return [what if what in nodes else "store"]


def _choose(
    rng: random.Random, now: float, busy: dict[str, float], data: Sequence[str]
) -> tuple[str, str, float] | None:
    """Choose (what, how, longest duration in seconds), None if every candidate is busy."""
    free = [name for name, until in busy.items() if until <= now]
    hit = [name for name in busy if name not in free]
    if "store" in free and rng.random() < STORE_SHARE:
        return rng.choice((*data, "index", "data", "both")), *_draw_fault(rng, STORE_FAULTS)
    nodes = [name for name in free if name != "store"]
    decode_hit = any(name.startswith("decode") for name in hit)
    if not decode_hit and rng.random() < ALL_SHARE:
        return ALL_DECODE, *_draw_fault(rng, NODE_FAULTS)
    if decode_hit and rng.random() > SECOND_DECODE_SHARE:
        nodes = [name for name in nodes if not name.startswith("decode")]
    return (rng.choice(nodes), *_draw_fault(rng, NODE_FAULTS)) if nodes else None


def _draw_fault(rng: random.Random, faults: Sequence[tuple[str, int, float]]) -> tuple[str, float]:
    [(how, _, most)] = rng.choices(faults, weights=[weight for _, weight, _ in faults])
    return how, most

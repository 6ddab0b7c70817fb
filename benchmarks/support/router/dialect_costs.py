"""What a stream costs the router in each dialect, and if it is kept, beside a chat stream.

32 clients in a closed loop ask one router with one node on the simulated engine, a token every
10 ms; kept streams are on a Redis of their own. Each dialect gets prompts and answers of the same
sizes. The dialects take turns.

In: questions. Out: CPU ms of the router per request, of each pass, by dialect; their table and
goals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from baton_kvstore.embedded.servers import EmbeddedStore
from benchmarks.support.figures import ratio, rotated, spread
from benchmarks.support.role_processes import cpu_s
from benchmarks.support.router.load_generator import (
    CHAT,
    KEPT_CHAT,
    MESSAGES,
    RESPONSES,
    Form,
    Question,
    closed_loop,
    http_clients,
)
from benchmarks.support.router.routers import Side, baton

CLIENTS, REQUESTS, DELAY_MS = 32, 320, 10.0
BASE, KEPT = "chat", "chat, kept"
FORMS = {BASE: CHAT, "responses": RESPONSES, "messages": MESSAGES, KEPT: KEPT_CHAT}
GOALS = {"responses": 1.15, "messages": 1.15, KEPT: 1.05}

Costs = Mapping[str, Sequence[float]]


def dialect_costs(
    questions: Callable[[int], list[Question]],
    model: Path,
    *,
    passes: int,
    less: int,
    profile: str = "",
) -> Costs:
    """One pass that does not count goes ahead; `less` divides the requests of a pass."""
    costs: dict[str, list[float]] = {name: [] for name in FORMS}
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedStore())
        side = baton(stack, DELAY_MS, model, profile, store.index_url)
        for number in range(passes + 1):
            for name in rotated([*FORMS], number):
                asked = questions(max(CLIENTS, REQUESTS // less if number else 0))
                cost = asyncio.run(one_pass(side, FORMS[name], asked))
                if number:
                    costs[name].append(cost)
    return costs


async def one_pass(side: Side, form: Form, asked: Sequence[Question]) -> float:
    router = side.counted[:1]
    async with http_clients(side.port, side.model, CLIENTS, form) as senders:
        before = cpu_s(router)
        await closed_loop(senders, asked)
        return 1e3 * (cpu_s(router) - before) / len(asked)


def dialect_table(costs: Costs) -> list[str]:
    """Medians and ranges, and ratios to chat, pass by pass."""
    lines = [f"{f'{CLIENTS} clients, {DELAY_MS:g} ms':26}{'router CPU ms':>20}{'x chat':>8}"]
    for name, each in costs.items():
        lines.append(f"{name:26}{spread(each):>20}{ratio(each, costs[BASE]):8.2f}")
    return lines


def dialect_goals(costs: Costs) -> list[tuple[str, bool]]:
    """Each with whether it is met."""
    found = {name: ratio(costs[name], costs[BASE]) for name in GOALS}
    return [
        (f"CPU of {name} {found[name]:.2f}x {BASE}'s (goal {most}x)", found[name] <= most)
        for name, most in GOALS.items()
    ]

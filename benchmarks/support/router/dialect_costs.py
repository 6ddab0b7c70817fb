"""What a stream costs the router in each dialect, and if it is kept, beside a chat stream.

Two routers, each with a node on the simulated engine that makes a token every 10 ms and a Redis of
its own, work at once: 32 clients in a closed loop stream chat from one, and 32 stream the other
form from the other. Then they swap, which is one pass. So both forms have the same minute of the
machine, and the same router. All prompts and answers have the same sizes.

In: questions. Out: CPU ms of the router per request, for chat and for the form beside it, of each
pass, by form; their table and goals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

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

CLIENTS, REQUESTS, DELAY_MS = 32, 160, 10.0
KEPT = "chat, kept"
FORMS = {"responses": RESPONSES, "messages": MESSAGES, KEPT: KEPT_CHAT}
GOALS = {"responses": 1.15, "messages": 1.15, KEPT: 1.05}


class Cost(NamedTuple):
    """CPU ms of the router per request in one pass."""

    form: float
    chat: float


Costs = Mapping[str, Sequence[Cost]]


def dialect_costs(
    questions: Callable[[int], list[Question]],
    model: Path,
    *,
    passes: int,
    less: int,
    profile: str = "",
) -> Costs:
    """One pass that does not count goes ahead; `less` divides the requests of a pass. `profile` is
    the file for the cProfile output of the first router."""
    costs: dict[str, list[Cost]] = {name: [] for name in FORMS}
    with ExitStack() as stack:
        stores = [stack.enter_context(EmbeddedStore()) for _ in range(2)]
        sides = [
            baton(stack, DELAY_MS, model, file, store.index_url)
            for store, file in zip(stores, (profile, ""), strict=True)
        ]
        for number in range(passes + 1):
            for name in rotated([*FORMS], number):
                count = max(CLIENTS, REQUESTS // less if number else 0)
                asked = [questions(count) for _ in range(4)]
                form_1, chat_1 = asyncio.run(_at_once(sides, (FORMS[name], CHAT), asked[:2]))
                chat_2, form_2 = asyncio.run(_at_once(sides, (CHAT, FORMS[name]), asked[2:]))
                if number:
                    costs[name].append(Cost((form_1 + form_2) / 2, (chat_1 + chat_2) / 2))
    return costs


async def _at_once(
    sides: Sequence[Side], forms: Sequence[Form], asked: Sequence[Sequence[Question]]
) -> list[float]:
    """CPU ms per request of each side's router."""
    pairs = zip(sides, forms, asked, strict=True)
    return await asyncio.gather(*(_one_form(*pair) for pair in pairs))


async def _one_form(side: Side, form: Form, asked: Sequence[Question]) -> float:
    router = side.counted[:1]
    async with http_clients(side.port, side.model, CLIENTS, form) as senders:
        before = cpu_s(router)
        await closed_loop(senders, asked)
        return 1e3 * (cpu_s(router) - before) / len(asked)


def _ratio(costs: Sequence[Cost]) -> float:
    return ratio([cost.form for cost in costs], [cost.chat for cost in costs])


def dialect_table(costs: Costs) -> list[str]:
    """Medians and ranges, and ratios to the chat beside it, pass by pass."""
    title = f"{CLIENTS} clients, {DELAY_MS:g} ms"
    lines = [f"{title:22}{'router CPU ms':>20}{'of chat beside it':>20}{'ratio':>8}"]
    for name, each in costs.items():
        form, chat = (spread(values) for values in zip(*each, strict=True))
        lines.append(f"{name:22}{form:>20}{chat:>20}{_ratio(each):8.2f}")
    return lines


def dialect_goals(costs: Costs) -> list[tuple[str, bool]]:
    """Each with whether it is met."""
    found = {name: _ratio(costs[name]) for name in GOALS}
    return [
        (f"CPU of {name} {found[name]:.2f}x chat's (goal {most}x)", found[name] <= most)
        for name, most in GOALS.items()
    ]

"""A node whose answers follow from the text of each prompt: a model with a script.

In: a function from a prompt's text to the answer's. Out: a FakeNode for a router; it needs no
weights, so that a test decides which tools the model calls, and what it says in the end.
"""

from __future__ import annotations

from collections.abc import Callable

from baton_protocol.link import Delta, Deltas, RequestStats, RunJob
from tests.support.nodes.fake_node import Behaviour, FakeNode

LONGEST = 1 << 20  # tokens, which are bytes: prompts of agents have 100 kB


class TalkingNode(FakeNode):
    """`prompts` are the texts of all prompts so far."""

    def __init__(self, name: str, answer: Callable[[str], str]) -> None:
        super().__init__(name, "decode", max_model_len=LONGEST)
        self.prompts: list[str] = []
        self._answer = answer

    async def _run(self, job: RunJob, behaviour: Behaviour) -> None:
        request = job.request
        prompt = bytes(id for id in request.prompt_ids if id < 256).decode()
        self.prompts.append(prompt)
        reply = self._answer(prompt)
        ids = tuple(reply.encode())
        stats = RequestStats(
            prompt_tokens=len(prompt), cached_tokens=0, computed_tokens=len(prompt)
        )
        await self.say(
            Deltas(
                (
                    Delta(
                        *(request.id, request.attempt, 0, 0),
                        ids=ids,
                        text=reply,
                        finish="stop",
                        stats=stats,
                    ),
                )
            )
        )

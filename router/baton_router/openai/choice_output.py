"""Collects the deltas of a choice for an answer in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import FinishReason


@dataclass(slots=True)
class ChoiceOutput:
    """Collects one choice, delta by delta."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop: str | int | None = None
    vector: bytes = b""

    def add(self, delta: Delta) -> None:
        self.ids.extend(delta.ids)
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.vector = self.vector or delta.vector
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.finish is not None, "an answer in one piece is written when its choices ended"
        return self.finish


def prompt_positions(choices: Sequence[ChoiceOutput]) -> tuple[PositionLogprobs, ...]:
    """The prompt logprobs of one request, which came with the first delta of any of its choices."""
    return next((choice.prompt_logprobs for choice in choices if choice.prompt_logprobs), ())

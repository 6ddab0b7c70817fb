"""The usage in the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from baton_protocol.link import Delta
from baton_router.openai.answers import Usage
from baton_router.openai.call import Options


class StreamUsage:
    """The usage in each event: if `continuous`, that of its choice so far, else
    `default`. `prompt_tokens` holds the number of prompt tokens of each choice."""

    def __init__(self, options: Options, prompt_tokens: Sequence[int]) -> None:
        self.default: UnsetType | None = None if options.include_usage else UNSET
        self.continuous = options.continuous_usage
        self._prompt_tokens = prompt_tokens
        self._generated = [0] * len(prompt_tokens)

    def count_delta(self, index: int, delta: Delta) -> None:
        """Count a delta, even one without an event."""
        self._generated[index] += len(delta.ids)

    def usage_of(self, index: int) -> Usage:
        """Usage of this choice so far."""
        return Usage.of(self._prompt_tokens[index], self._generated[index])

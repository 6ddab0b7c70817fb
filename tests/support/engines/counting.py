"""A logits processor of another package, as tests name it: it makes a model count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from baton_engine.interface import ChangeLogits

COUNTING = f"{__name__}:Counting"


class Counting:
    """Permits one id: how many tokens there are, plus an argument."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def change_for(self, args: Mapping[str, Any]) -> ChangeLogits | None:
        if "count_from" not in args:
            return None
        first = args["count_from"]
        if not isinstance(first, int):
            raise ValueError(f"count_from is {first!r}, which is no integer")

        def change(
            logits_V: torch.Tensor, prompt: Sequence[int], outputs: Sequence[int]
        ) -> torch.Tensor:
            id = (first + len(prompt) + len(outputs)) % self.vocab_size
            kept = logits_V[id].clone()
            logits_V.fill_(float("-inf"))
            logits_V[id] = kept
            return logits_V

        return change

"""The suite finds an operation whose bits depend on the batch, and names where it lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine import build
from baton_engine.layers.ops import TorchOps
from tests.bits.cells import Bench, Differs
from tests.bits.test_paths import check

MANY = 4  # tokens of a step from which on the broken operations give other bits


def changed(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers, in steps of many tokens each with the next float32 in place of one of them."""
    if len(numbers) > MANY:
        first = numbers.flatten(1)[:, :1]
        first.copy_(first.nextafter(torch.tensor(torch.inf)))
    return numbers


class BrokenAttention(TorchOps):
    def attend(self, *arguments: Any) -> torch.Tensor:
        result = super().attend(*arguments)
        layer = arguments[4]
        return changed(result) if layer == 1 else result


class BrokenActivation(TorchOps):
    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        return changed(super().silu_mul(gate_up_TF))


@pytest.mark.parametrize(
    ("ops", "place"),
    [
        (BrokenAttention(), "layer 1 attention out, input"),
        (BrokenActivation(), "layer 0 mlp down, input"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_operation_whose_bits_depend_on_the_batch_is_found_and_named(
    ops: TorchOps,
    place: str,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "TORCH_OPS", ops)
    with pytest.raises(Differs) as caught:
        check(Bench(tiny_model("llama-gqa2-tied"), "float32", thorough=False), "in crowds")
    [note] = caught.value.__notes__
    assert note.startswith(f"the first difference is in {place}, for the token at position ")

"""A device that lacks memory somewhere in a step: the runner tries once more. If that fails, too,
the next launch finds the runner as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton_engine.errors import OutOfMemory
from baton_engine.interface import Row, RowResult
from baton_engine.runner.model_runner import TorchRunner
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.decoding import make_runner
from tests.support.engines.live_bytes import LiveBytes
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import ask

SAMPLED = SamplingParams(temperature=1.0, seed=7, top_p=0.9, logprobs=2, logit_bias=((5, 1.0),))
PARAMS = [SamplingParams(temperature=0.0), SAMPLED, SamplingParams(seed=3)]
LENGTHS = [5, 11, 20]


class LackingDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device lacks memory for operation number `at` (from 0) of the next `times` launches;
    `live` counts the bytes of tensors. `left` are the bytes when the operations start again."""

    def __init__(self, live: LiveBytes, at: int = -1, times: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live, self._at, self._times = live, at, times
        self.operations = 0
        self.left: list[int] = []
        self.raised = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        number, self.operations = self.operations, self.operations + 1
        if number == 0:
            self.left.append(self._live.now)
        if number == self._at and self.raised < self._times:
            self.raised += 1
            self.operations = 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nadvice")
        return func(*args, **(kwargs or {}))


def prompts() -> list[Row]:
    return [
        Row(prompt_of(length, seed=index), 0, blocks(index), ask(length, params), None, None, key)
        for index, (length, params, key) in enumerate(zip(LENGTHS, PARAMS, (1, 2, 3), strict=True))
    ]


def awaiting(first_key: int) -> list[Row]:
    """The rows after prompts(), whose tokens are samples of that step. Fewer sequences continue, in
    another order, so the samples' order differs from that of the step before."""
    return [
        Row(
            (0,),
            LENGTHS[index],
            blocks(index),
            ask(LENGTHS[index] + 1, PARAMS[index]),
            None,
            index,
            key,
        )
        for key, index in enumerate((2, 0), start=first_key)
    ]


def blocks(index: int) -> list[BlockId]:
    return [BlockId(1 + 4 * index + each) for each in range(4)]


def step_with(
    runner: TorchRunner, rows: Sequence[Row], at: int, times: int
) -> tuple[list[RowResult] | OutOfMemory, LackingDevice]:
    """A step on a device that lacks memory. An error is returned without its traceback, which
    would keep tensors alive."""
    live = LiveBytes()
    device = LackingDevice(live, at, times)
    with live, device:
        try:
            return runner.launch(rows).read(), device
        except OutOfMemory as error:
            found = error.with_traceback(None)
    return found, device


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3-gqa4")


def places(operations: int) -> range:
    """About a dozen numbers of operations, over the whole step."""
    assert operations > 30
    return range(0, operations, operations // 12)


def test_a_step_that_lacks_memory_at_any_operation_is_repeated(folder: Path) -> None:
    runner = make_runner(folder)
    first, _ = step_with(runner, prompts(), -1, 0)
    second, device = step_with(runner, awaiting(4), -1, 0)
    for at in places(device.operations):
        assert step_with(runner, prompts(), at, 1)[0] == first
        again, lacking = step_with(runner, awaiting(4), at, 1)
        assert again == second
        assert lacking.raised == 1
        assert lacking.left == [0, 0], "tensors of the failed step are alive while it is repeated"


def test_if_memory_is_still_lacking_nothing_has_changed_for_the_next_launch(folder: Path) -> None:
    runner = make_runner(folder)
    step_with(runner, prompts(), -1, 0)
    second, device = step_with(runner, awaiting(4), -1, 0)
    step_with(runner, prompts(), -1, 0)
    for number, at in enumerate(places(device.operations)):
        lacking, failed = step_with(runner, awaiting(10 * number + 4), at, 2)
        assert isinstance(lacking, OutOfMemory)
        assert str(lacking) == "CUDA out of memory. Tried to allocate 2 GiB"
        assert (lacking.__cause__, lacking.__context__) == (None, None)
        assert failed.raised == 2
    assert step_with(runner, awaiting(1000), -1, 0)[0] == second

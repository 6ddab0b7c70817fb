"""Drives a torch runner step by step, read at once or one step late, without an engine.

In: a tiny model and streams, each a sequence of its own with blocks of its own. Out: the ids that
each stream was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton_engine.attention.selector import Kernels, attention_for
from baton_engine.build import ops_for
from baton_engine.config.model_config import read_config
from baton_engine.interface import Launched, Row, Sample
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.registry import build_model
from baton_engine.runner.cuda_graphs import DecodeSteps, Recorder
from baton_engine.runner.input_buffers import STAGING_BUFFERS, Staging, staging_for
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.weights.loader import load_weights
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.demands import kv_layout
from tests.support.engines.tiny_models import prompt_of

BLOCK = 8
BLOCKS = 400
WIDTH = 12  # blocks that a line may have
GREEDY = SamplingParams(temperature=0.0)
# One of each kind that a plain decode step takes.
KINDS = (
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1.5, top_k=20),
    SamplingParams(seed=-3, temperature=0.8, top_p=0.7),
    SamplingParams(seed=4, min_p=0.05),
)


class RecordingGraphs:
    """In place of recorded graphs: calls at once, and notes to which size each step is padded."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, size: int, compute: Callable[[], None]) -> None:
        self.sizes.append(size)
        compute()


def make_runner(
    folder: Path,
    *,
    kernels: Kernels = "torch",
    sizes: Sequence[int] = (),
    recorder: Recorder | None = None,
    make_staging: Callable[[int, torch.device], Staging] = staging_for,
    device: torch.device | None = None,
) -> TorchRunner:
    """In float32, with a pool of BLOCKS blocks of BLOCK tokens; padded to `sizes`, if any."""
    config, device = read_config(folder), device or torch.device("cpu")
    slots = WeightSlots(torch.float32, device, ops_for(kernels))
    model = build_model(config, slots)
    load_weights(folder, config, slots)
    slots.finish()
    layout = kv_layout(
        layers=config.num_layers, heads=config.num_kv_heads, dim=config.head_dim, block=BLOCK
    )
    memory = TorchMemory(layout, BLOCKS, device)
    attention = attention_for(kernels, memory, config)
    steps = DecodeSteps(
        *(model, memory, attention),
        sizes=sizes,
        width=WIDTH,
        recorder=recorder,
        make_staging=make_staging,
    )
    return TorchRunner(model, memory, attention, steps)


class OverwrittenCopy:
    """A copy that is over; what was copied from is then anything."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.copies = 0

    def record(self) -> None:
        self.copies += 1

    def synchronize(self) -> None:
        self.host.fill_(-7_777_777)


def spoiled_staging(size: int, device: torch.device) -> Staging:
    """As on CUDA, in plain memory: a step has to write all that it sends, and to send it."""
    hosts = [torch.zeros(size, dtype=torch.int32) for _ in range(STAGING_BUFFERS)]
    return Staging(size, device, [(host, OverwrittenCopy(host)) for host in hosts])


@dataclass
class Stream:
    """A sequence: its prompt, then what it was given. `started` tokens have been launched."""

    params: SamplingParams
    prompt: list[int]
    blocks: list[BlockId]
    key: int
    started: int = 0
    given: list[int] = field(default_factory=list)

    def row(self, after: int | None = None) -> Row:
        """All tokens known and not launched; with `after` the one that is not read yet. Blocks are
        those needed so far, and one more, as an engine hands them out."""
        known = [*self.prompt, *self.given]
        tokens = known[self.started :] if after is None else [-1]
        end = self.started + len(tokens)
        sample = Sample(0, end, self.params)
        blocks = self.blocks[: end // BLOCK + 1]
        return Row(tokens, self.started, blocks, (sample,), None, after, self.key)


def streams(lengths: Sequence[int], kinds: Sequence[SamplingParams] = KINDS) -> list[Stream]:
    """Prompts of these lengths; of all kinds by turns. Blocks are not in order."""
    made = []
    free = iter(range(BLOCKS, 0, -1))
    for number, length in enumerate(lengths):
        blocks = [BlockId(next(free)) for _ in range(WIDTH)]
        params = kinds[number % len(kinds)]
        made.append(Stream(params, prompt_of(length, seed=number), blocks, number + 1))
    return made


class Driver:
    """Launches steps, of which at most two are under way."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._unread: tuple[Launched, list[Stream]] | None = None

    def step(
        self,
        batch: Sequence[Stream],
        *,
        late: bool = False,
        change: Callable[[Row], Row] = lambda r: r,
    ) -> None:
        """One step of these streams. `late` launches it before the step before it is read."""
        if not late:
            self.read()
        before = [] if self._unread is None else self._unread[1]
        rows = []
        for each in batch:
            waits = any(each is other for other in before)
            after = [other.key for other in before].index(each.key) if waits else None
            rows.append(change(each.row(after)))
            each.started += len(rows[-1].tokens)
        launched = self._runner.launch(rows)
        self.read()
        self._unread = launched, list(batch)

    def read(self) -> None:
        if self._unread is not None:
            launched, batch = self._unread
            for each, result in zip(batch, launched.read(), strict=True):
                each.given += [sampled.id for sampled in result.samples]
            self._unread = None


def alone(runner: TorchRunner, lengths: Sequence[int], steps: int) -> list[list[int]]:
    """What each stream is given if it has every step for itself and all is laid out anew."""
    made = streams(lengths)
    for each in made:
        each.key = 0
        driver = Driver(runner)
        for _ in range(steps):
            driver.step([each])
        driver.read()
    return [each.given for each in made]

"""Drives a torch runner step by step without an engine, and reads steps at once or one step late.

In: a tiny model and streams, each a sequence with its own blocks. Out: the ids that each stream
generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton_engine.attention.interface import AttentionBackend
from baton_engine.attention.selector import Kernels, attention_for
from baton_engine.build import linear_methods, ops_for
from baton_engine.config.families import read_config
from baton_engine.interface import Launched, Row, Sample
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.requirements import groups_of
from baton_engine.models.registry import build_model
from baton_engine.runner.forward import Compute, Forward
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.staging_buffers import STAGING_BUFFERS, Staging
from baton_engine.weights.loader import load_weights
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.demands import kv_layout
from tests.support.engines.tiny_models import prompt_of

CPU = torch.device("cpu")
BLOCK = 8
BLOCKS = 400
WIDTH = 12  # the most blocks of a row
GREEDY = SamplingParams(temperature=0.0)
# One of each kind of sampling parameters.
KINDS = (
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1.5, top_k=20),
    SamplingParams(seed=-3, temperature=0.8, top_p=0.7),
    SamplingParams(seed=4, min_p=0.05),
)


class RecordingGraphs:
    """Replaces recorded graphs: computes directly, and records the padded size of each step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, size: int, compute: Compute) -> torch.Tensor:
        self.sizes.append(size)
        return compute()


def make_runner(
    folder: Path,
    *,
    kernels: Kernels = "torch",
    exact: bool = False,
    grouped: bool = False,
    device: torch.device = CPU,
    watched: Callable[[AttentionBackend], AttentionBackend] = lambda attention: attention,
    **forward: Any,
) -> TorchRunner:
    """Build a float32 runner with a pool of BLOCKS blocks of BLOCK tokens. With `grouped`, layers
    with a window have blocks of their own. `watched` may wrap the attention backend. `forward` are
    arguments of Forward: lines are padded to `sizes`, if any."""
    config = read_config(folder)
    methods = linear_methods(kernels, exact=exact)
    slots = WeightSlots(torch.float32, device, ops_for(kernels), method_of=methods)
    model = build_model(config, slots)
    load_weights(folder, config, slots)
    slots.finish()
    layout = kv_layout(
        layers=config.num_layers,
        heads=config.num_kv_heads,
        dim=config.head_dim,
        block=BLOCK,
        groups=groups_of(config, config.dtype) if grouped else (),
    )
    memory = TorchMemory(layout, BLOCKS, device)
    attention = watched(attention_for(kernels, memory, config, exact=exact))
    options = {"width": WIDTH, **forward}
    return TorchRunner(model, memory, attention, Forward(model, memory, attention, **options))


class OverwrittenCopy:
    """A finished copy: synchronize() overwrites the source, which may then hold anything."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.copies = 0

    def record(self) -> None:
        self.copies += 1

    def synchronize(self) -> None:
        self.host.fill_(-7_777_777)


def spoiled_staging(size: int, device: torch.device) -> Staging:
    """Staging as on CUDA, but in plain memory. It spoils its buffers after each copy, so a step
    must write everything that it sends."""
    hosts = [torch.zeros(size, dtype=torch.int32) for _ in range(STAGING_BUFFERS)]
    return Staging(size, device, [(host, OverwrittenCopy(host)) for host in hosts])


@dataclass
class Stream:
    """A sequence: its prompt, then the ids `given` to it. `started` tokens have been launched."""

    params: SamplingParams
    prompt: list[int]
    blocks: list[BlockId]
    key: int
    started: int = 0
    given: list[int] = field(default_factory=list)

    def row(self, after: int | None = None) -> Row:
        """A row with all known tokens that were not launched; with `after`, with the one token
        whose step is not read yet. Like an engine, it includes up to one block beyond those in
        use."""
        known = [*self.prompt, *self.given]
        tokens = known[self.started :] if after is None else [-1]
        end = self.started + len(tokens)
        sample = Sample(0, end, self.params)
        blocks = self.blocks[: end // BLOCK + 1]
        return Row(tokens, self.started, blocks, (sample,), None, after, self.key)


def streams(lengths: Sequence[int], kinds: Sequence[SamplingParams] = KINDS) -> list[Stream]:
    """Make streams with prompts of these lengths, cycling through `kinds`. Their blocks are not in
    ascending order."""
    result = []
    free = iter(range(BLOCKS, 0, -1))
    for number, length in enumerate(lengths):
        blocks = [BlockId(next(free)) for _ in range(WIDTH)]
        params = kinds[number % len(kinds)]
        result.append(Stream(params, prompt_of(length, seed=number), blocks, number + 1))
    return result


class Driver:
    """Launches steps; at most two are in flight."""

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
        """Launch one step of these streams. With `late`, launch it before the previous step is
        read."""
        if not late:
            self.read()
        before = [] if self._unread is None else self._unread[1]
        rows = []
        for each in batch:
            is_unread = any(each is other for other in before)
            after = [other.key for other in before].index(each.key) if is_unread else None
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
    """The ids of each stream when it runs alone, with a new driver."""
    batch = streams(lengths)
    for each in batch:
        each.key = 0
        driver = Driver(runner)
        for _ in range(steps):
            driver.step([each])
        driver.read()
    return [each.given for each in batch]

"""A row of few new tokens is as many lines of a padded step, and longer rows run beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from baton_engine.attention import triton_backend, triton_paged_attention
from baton_engine.attention.interface import AttentionBackend, StepAttention, StepBatch
from baton_engine.interface import PromptAsk, Row, RowResult, Sample
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers import triton_matmul
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.staging_buffers import Staging
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.decoding import BLOCK, BLOCKS, make_runner, spoiled_staging
from tests.support.engines.kernels import DEVICE, noise
from tests.support.engines.small_pool import kv_of
from tests.support.engines.tiny_models import prompt_of

Folders = Callable[[str], Path]
Spans = Sequence[tuple[int, int]]  # of rows: the first new token's position, and new tokens
SIZES = (1, 2, 4, 8, 16, 32)
MODEL = "llama-gqa2-tied"
LOGPROBS = SamplingParams(temperature=0.0, logprobs=20)
DRAWN = SamplingParams(seed=3, temperature=1.5, logprobs=2)


@dataclass
class Watched:
    """An attention backend that records the passes of each step: rows, the most new tokens of a
    row, and rows with one new token."""

    attention: AttentionBackend
    passes: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return self.attention.exact

    @property
    def recordable(self) -> bool:
        return self.attention.recordable

    def begin(self, batch: StepBatch) -> StepAttention:
        self.passes.append((batch.rows, batch.max_query_len, batch.one_token_rows))
        return self.attention.begin(batch)


def pool_of(runner: TorchRunner) -> torch.Tensor:
    memory = runner.memory
    assert isinstance(memory, TorchMemory)
    return kv_of(memory)


def rows_of(spans: Spans, groups: int = 1, *, params: SamplingParams = LOGPROBS) -> list[Row]:
    """Rows with a sample after each of their last three new tokens, and with blocks in no order.
    The last of several short rows has several choices and wants logprobs of its prompt."""
    free = [BlockId(block) for block in range(1, BLOCKS + 1)]
    random.Random(1).shuffle(free)
    rows = []
    for number, (start, tokens) in enumerate(spans):
        end = start + tokens
        blocks = [free.pop() for _ in range((end // BLOCK + 1) * groups)]
        samples = [Sample(0, at, params) for at in range(max(start + 1, end - 2), end + 1)]
        ids = prompt_of(end, seed=number)[start:]
        rows.append(Row(ids, start, blocks, tuple(samples)))
    for row in [row for row in rows if 1 < len(row.tokens) <= 16][-1:]:
        end = row.start + len(row.tokens)
        samples = [Sample(choice, end, DRAWN) for choice in range(3)]
        ask = PromptAsk(tuple(row.tokens[1:]), 2)
        rows[rows.index(row)] = Row(row.tokens, row.start, row.blocks, tuple(samples), ask)
    return rows


def compute(runner: TorchRunner, rows: Sequence[Row]) -> list[RowResult]:
    """The results of a step of these rows, after steps that compute the tokens before them."""
    for number, row in enumerate(rows):
        if row.start:
            before = prompt_of(row.start + len(row.tokens), seed=number)[: row.start]
            runner.launch([Row(before, 0, row.blocks)]).read()
    return runner.launch(rows).read()


PASSES: dict[str, tuple[list[int], list[tuple[int, int, int]]]] = {
    "decode rows": ([1] * 3, [(4, 1, 4)]),
    "a tail": ([16], [(16, 1, 16)]),
    "a prompt": ([17], [(1, 17, 0)]),
    "decode rows and a tail": ([1, 3, 1], [(8, 1, 8)]),
    "decode rows and a prompt": ([40, 1, 1], [(2, 1, 2), (1, 40, 0)]),
    "decode rows, tails and prompts": ([40, 1, 5, 30, 2], [(8, 1, 8), (2, 40, 0)]),
    "more tails than lines": ([16, 16, 16], [(32, 1, 32), (1, 16, 0)]),
    "a tail without room": ([2] + [1] * 31, [(32, 1, 32), (1, 2, 0)]),
    "more decode rows than lines": ([1] * 33, [(33, 1, 33)]),
    "more decode rows than lines, and a tail": ([1] * 33 + [2], [(34, 2, 33)]),
}


@pytest.mark.parametrize(("counts", "passes"), PASSES.values(), ids=PASSES)
def test_rows_of_up_to_16_tokens_are_lines_and_longer_rows_a_second_pass(
    counts: list[int], passes: list[tuple[int, int, int]], tiny_model: Folders
) -> None:
    watched: list[Watched] = []

    def watch(attention: AttentionBackend) -> Watched:
        watched.append(Watched(attention))
        return watched[0]

    runner = make_runner(tiny_model(MODEL), sizes=SIZES, watched=watch)
    runner.launch(rows_of([(0, count) for count in counts])).read()
    assert watched[0].passes == passes


@pytest.mark.parametrize("counts", [case[0] for case in PASSES.values()], ids=PASSES)
def test_without_sizes_all_rows_are_one_pass(counts: list[int], tiny_model: Folders) -> None:
    watched: list[Watched] = []

    def watch(attention: AttentionBackend) -> Watched:
        watched.append(Watched(attention))
        return watched[0]

    runner = make_runner(tiny_model(MODEL), watched=watch)
    runner.launch(rows_of([(0, count) for count in counts])).read()
    assert watched[0].passes == [(len(counts), max(counts), counts.count(1))]


MIXES: dict[str, Spans] = {
    "decode rows and a tail": [(20, 1), (9, 1), (16, 5)],
    "tails alone": [(41, 15), (0, 3)],
    "a decode row and a prompt": [(0, 25), (30, 1)],
    "all kinds": [(60, 1), (0, 40), (3, 1), (48, 9), (8, 2), (16, 20), (35, 12)],
    "more tails than lines": [(5, 1), (8, 16), (16, 16), (24, 3)],
}


@pytest.mark.parametrize("name", [MODEL, "qwen3-window", "gemma2"])
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_results_and_kv_equal_those_of_a_step_in_one_pass(
    spans: Spans, name: str, tiny_model: Folders
) -> None:
    """To the last bit of each logprob. The models have windows that tails are longer than."""
    folder = tiny_model(name)
    plain = make_runner(folder, grouped=True)
    padded = make_runner(folder, grouped=True, sizes=SIZES, make_staging=spoiled_staging)
    for runner in (plain, padded):
        pool_of(runner)[1:].fill_(torch.nan)
    rows = rows_of(spans, max(1, plain.memory.layout.num_groups))
    assert compute(padded, rows) == compute(plain, rows)
    one, other = pool_of(plain)[1:], pool_of(padded)[1:]
    assert torch.equal(one.isfinite(), other.isfinite())
    assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("length", [3, 20], ids=["a short row", "a longer row"])
def test_the_last_token_of_a_row_may_be_a_sample_of_the_step_before(
    length: int, tiny_model: Folders
) -> None:
    """Beside a decode row that awaits its token, too. Both steps are launched before one is
    read."""
    runner = make_runner(tiny_model(MODEL), sizes=SIZES, make_staging=spoiled_staging)
    prompts, tail = [prompt_of(9, seed=1), prompt_of(30, seed=2)], prompt_of(length, seed=3)
    blocks = [[BlockId(each) for each in range(first, first + 8)] for first in (1, 11)]
    first = [
        Row(prompt, 0, held, (Sample(0, len(prompt), LOGPROBS),))
        for prompt, held in zip(prompts, blocks, strict=True)
    ]

    def second(ids: Sequence[int], after: Sequence[int | None]) -> list[Row]:
        tokens, starts = [[ids[0]], [*tail[:-1], ids[1]]], [9, 30]
        return [
            Row(some, start, held, (Sample(0, start + len(some), LOGPROBS),), None, source)
            for some, start, held, source in zip(tokens, starts, blocks, after, strict=True)
        ]

    launched = runner.launch(first)
    late = runner.launch(second([-1, -1], [0, 1]))
    ids = [result.samples[0].id for result in launched.read()]
    runner.launch(first).read()
    assert runner.launch(second(ids, [None, None])).read() == late.read()


def test_a_tail_has_the_same_bits_as_lines_and_in_one_pass_with_exact_kernels(
    tiny_model: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are divided among more programs in a small step than in a large one, with splits that
    are short enough for these rows."""
    for name in ("FIXED_SPLIT_KEYS", "SPLIT_KEYS", "MOST_KEYS"):
        monkeypatch.setattr(triton_paged_attention, name, 16)
    monkeypatch.setattr(triton_backend, "programs_for", lambda rows, *sizes: 8 // min(rows, 8))
    assert triton_matmul.FIXED_TILE.any_rows
    folder, spans = tiny_model("qwen3-window"), [(40, 2), (33, 1)]
    found = []
    for sizes in ((), SIZES):
        runner = make_runner(
            folder, kernels="triton", exact=True, grouped=True, device=DEVICE, sizes=sizes
        )
        assert runner.memory.layout.num_groups == 2
        pool_of(runner).copy_(noise(*pool_of(runner).shape))  # of the tokens before
        found.append(runner.launch(rows_of(spans, 2)).read())
    assert found[0] == found[1]


class CountingStaging(Staging):
    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        self.sent: list[int] = []

    def send(self, size: int) -> None:
        self.sent.append(4 * size)
        super().send(size)


def bytes_sent(folder: Path, width: int, spans: Spans) -> int:
    """Bytes that a step of these rows sends if a row may have `width` blocks."""
    made: list[CountingStaging] = []

    def make(size: int, device: torch.device) -> CountingStaging:
        made.append(CountingStaging(size, device))
        return made[0]

    runner = make_runner(folder, sizes=(8,), width=width, make_staging=make)
    runner.launch(rows_of(spans)).read()
    [sent] = made[0].sent
    return sent


def test_a_step_sends_its_tables_as_wide_as_its_longest_line(tiny_model: Folders) -> None:
    folder = tiny_model(MODEL)
    spans = [(3, 1), (12, 3), (0, 90)]  # lines of two blocks, beside a longer row
    narrow, wide = bytes_sent(folder, 12, spans), bytes_sent(folder, 5000, spans)
    assert narrow == wide < 2000
    lines, blocks = 8, (90 - 12) // BLOCK
    longer = bytes_sent(folder, 5000, [(3, 1), (90, 3), (0, 90)])
    assert abs(longer - wide - 4 * lines * (blocks + 1)) < 128  # rounded up

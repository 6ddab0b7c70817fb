"""Disaggregated and aggregated pools give the ids of transformers, over HTTP on real processes.

The axes of the matrix are model, nodes, chunked prefill, size of the KV pool, overlap and host
tier. Each cell runs every prompt length, alone and 16 at once, cold and warm. A cell with a tight
KV pool also runs more requests at once than the pool holds. `make test` runs one cell for each
number of nodes, and each switch is on in one cell and off in another. `make test-long` runs all
cells, and one of each model with experts. The references are `transformers generate` in fp32 (see
tests/support/engines/exactness).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_protocol.layout import KVLayout
from tests.support.clients.http import all_at_once, ids_of
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.tiny_models import EXPERT_MODELS, TINY_MODELS, prompt_of
from tests.support.pools.baton_up import Pool

NEW_TOKENS = 40
# Of a prompt that is alone, one token per step: past the end of its block, and of a window's.
ALONE_TOKENS = 18
BLOCK = 16
CHUNK_BLOCKS = 2
CHUNK = BLOCK * CHUNK_BLOCKS
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 600)
NODES = ((0, 1), (1, 1), (2, 2))
# A prompt of 600 tokens and its 40 new tokens take 40 blocks. Each request of the crowd causes
# preemptions even if it runs alone: its choices start with 7 blocks and grow to 49 or more.
CROWD, CROWD_TOKENS, CROWD_CHOICES = range(17, 31, 4), 128, 6
ROOMY_BLOCKS, TIGHT_BLOCKS = 1200, 44
HOST_MEMORY = "8MiB"


@dataclass(frozen=True)
class Cell:
    model: str
    nodes: tuple[int, int]
    pieces: bool
    tight: bool
    overlap: bool
    host: bool

    def __str__(self) -> str:
        pieces = "pieces" if self.pieces else "whole"
        blocks = "tight" if self.tight else "roomy"
        more = "-overlap" * self.overlap + "-host" * self.host
        return f"{self.model}-{self.nodes[0]}+{self.nodes[1]}-{pieces}-{blocks}{more}"

    def flags(self, folder: Path) -> list[str]:
        prefill, decode = self.nodes
        return [
            *("--model", str(folder), "--dtype", "float32", "--threads", "1"),
            *("--prefill", str(prefill), "--decode", str(decode)),
            *("--chunk-blocks", str(CHUNK_BLOCKS)),
            *("--kv-blocks", str(TIGHT_BLOCKS if self.tight else ROOMY_BLOCKS)),
            *("--max-batched-tokens", "7" if self.pieces else "2048"),
            *("--overlap", "on" if self.overlap else "off"),
            *("--host-kv-memory", HOST_MEMORY if self.host else "0"),
            *("--handoff", "always" if prefill else "auto"),
        ]


ALL_CELLS = [
    Cell(model, nodes, *switches)
    for model, nodes in itertools.product(TINY_MODELS, NODES)
    for switches in itertools.product((False, True), repeat=4)
]
# Models with experts have no cells of their own for the switches, which are about KV.
EXPERT_CELLS = [
    Cell(model, (1, 1), pieces=True, tight=False, overlap=True, host=False)
    for model in EXPERT_MODELS
]
SHORT = [
    Cell("llama-gqa4", (0, 1), pieces=True, tight=False, overlap=False, host=False),
    Cell("mistral-window", (1, 1), pieces=False, tight=True, overlap=True, host=True),
    Cell("gpt-oss", (2, 2), pieces=False, tight=False, overlap=True, host=False),
    Cell("deepseek-v3", (1, 1), pieces=False, tight=False, overlap=False, host=True),
]
# Models that transformers' code computes; one with windows in some layers, and one whose layers
# keep different KV.
BRIDGED = [
    Cell("gpt2", (1, 1), pieces=False, tight=False, overlap=False, host=False),
    Cell("gemma4", (1, 1), pieces=True, tight=False, overlap=False, host=True),
    Cell("cohere2", (1, 1), pieces=True, tight=False, overlap=True, host=True),
    Cell("phimoe", (2, 2), pieces=False, tight=False, overlap=False, host=False),
]


def test_the_short_matrix_has_each_number_of_nodes_and_each_switch_on_and_off() -> None:
    for axis in ("nodes", "pieces", "tight", "overlap", "host"):
        short, whole = ({getattr(cell, axis) for cell in cells} for cells in (SHORT, ALL_CELLS))
        assert short == whole, axis


def run_cell(cell: Cell, folder: Path, report: Callable[[str], None]) -> None:
    """Run all phases of one cell, and compare all ids with the references."""
    alone = [prompt_of(length, seed=1) for length in LENGTHS]
    together = [prompt_of(length, seed=seed) for length in LENGTHS for seed in (2, 3)]
    crowd = [prompt_of(length, seed=4) for length in CROWD] if cell.tight else []
    tally = Tally()
    with Pool(cell.flags(folder)) as pool:
        for phase in ("cold", "warm"):
            before = pool.totals()
            for prompt in alone:
                check(pool, folder, [prompt], ALONE_TOKENS, tally)
            check(pool, folder, together, NEW_TOKENS, tally)
            if crowd:
                check(pool, folder, crowd, CROWD_TOKENS, tally, CROWD_CHOICES)
            if phase == "cold":
                layout = msgspec.convert(pool.pool()["nodes"][0]["layout"], KVLayout)
                cold = [*alone, *together, *crowd]
                check_handoff(cell, layout, before, pool.totals(), cold)
        preemptions = pool.totals()["preemptions_total"]
    report(f"{cell}: {tally}; {preemptions} preemptions")
    tally.check()
    assert (preemptions > 0) == cell.tight, preemptions


def check(
    pool: Pool,
    folder: Path,
    prompts: list[list[int]],
    new_tokens: int,
    tally: Tally,
    choices: int = 1,
) -> None:
    """Send all prompts at once and compare the ids of each choice."""
    completions = all_at_once(
        pool.url, prompts, max_tokens=new_tokens, temperature=0, ignore_eos=True, n=choices
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        label = f"prompt of {len(prompt)}, one of {len(prompts)}"
        answers = ids_of(completion)
        assert len(answers) == choices
        for ids in answers:
            compare(reference(folder, prompt, new_tokens, ids), ids, tally, label)


def check_handoff(
    cell: Cell,
    layout: KVLayout,
    before: dict[str, int],
    after: dict[str, int],
    prompts: list[list[int]],
) -> None:
    """With prefill nodes, exactly the full chunks of the cold prompts were handed over, or if all
    layers have windows, those that the last window reaches; without, none. Chunks that decode nodes
    write behind are not counted."""
    full = sum(len(prompt) // CHUNK for prompt in prompts)
    if not layout.num_full_groups:
        full -= sum(layout.first_complete(len(prompt) // CHUNK) for prompt in prompts)

    def increase(name: str) -> int:
        return after[name] - before[name]

    handed_over = increase("published_chunks_total") - increase("behind_chunks_total")
    assert handed_over == (full if cell.nodes[0] else 0)
    if cell.nodes[0]:
        # In a tight pool a parked request may lose its blocks and fetch them again.
        assert min(increase("reused_chunks_total"), increase("fetched_chunks_total")) >= full
    else:
        assert increase("handoffs_total") == 0


def shows(cells: Iterable[Cell]) -> list[Any]:
    """The cells, which with prefill nodes show hand-offs."""
    return [
        pytest.param(cell, marks=[pytest.mark.shows("handed off")] if cell.nodes[0] else [])
        for cell in cells
    ]


@pytest.mark.parametrize("cell", shows(SHORT), ids=str)
def test_ids_over_http_equal_those_of_transformers(
    cell: Cell, tiny_model: Callable[[str], Path], record_property: Callable[[str, object], None]
) -> None:
    run_cell(cell, tiny_model(cell.model), lambda line: record_property("exactness", line))


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [*shows(BRIDGED), *(c for c in ALL_CELLS if c not in SHORT), *EXPERT_CELLS], ids=str
)
def test_ids_over_http_equal_those_of_transformers_in_the_full_product(
    cell: Cell, tiny_model: Callable[[str], Path], record_property: Callable[[str, object], None]
) -> None:
    run_cell(cell, tiny_model(cell.model), lambda line: record_property("exactness", line))

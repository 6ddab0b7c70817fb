"""A node that dies takes no grammar with it: over 500 answers that must match a schema, a regex, a
grammar, a choice, a structural tag or calls of functions, on `sim`.

Each loses its node in the middle, at places that are drawn. Its ids are those of an undisturbed
pool; what has ended matches, and what was cut at its token limit is the beginning of something that
does. One answer of 20 structures runs always, the matrix in `make test-long`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from baton_text.grammars.grammars import Grammars
from tests.faults.conftest import SHORT_DRAIN, SLOW_DECODE
from tests.support.faults.grammar_runs import PartRun, Run, all_runs, parts, selection
from tests.support.faults.structures import STRUCTURES, TOKENIZER
from tests.support.pools.processes import SIM, Cluster

EOS = "--sim-eos-every=40"
SELECTED = 20


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Cluster]:
    with Cluster(0, 1, flags=[*SIM, EOS, "--kv-blocks=4000"], store=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def disturbed() -> Iterator[Cluster]:
    flags = [*SIM, EOS, "--kv-blocks=1000"]
    decode_flags = [*SLOW_DECODE, SHORT_DRAIN]
    router_flags = ["--handoff=always"]
    with Cluster(
        1, 2, flags=flags, decode_flags=decode_flags, router_flags=router_flags
    ) as cluster:
        yield cluster


ALWAYS = [(f"selected {number}", part) for number, part in enumerate(parts(selection(SELECTED)))]
LONG = [(f"part {number}", part) for number, part in enumerate(parts(all_runs()))]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "runs"),
    [*ALWAYS, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
    ids=[name for name, _ in (*ALWAYS, *LONG)],
)
def test_an_answer_keeps_its_grammar_when_its_node_dies(
    name: str,
    runs: Sequence[Run],
    disturbed: Cluster,
    undisturbed: Cluster,
    grammars: Grammars,
) -> None:
    part = PartRun(disturbed, undisturbed, grammars, name)
    try:
        part.run(runs)
    finally:
        disturbed.repair()
    print(f"{name}: {len(runs)} runs, {part.counts}")
    assert part.counts.ended > part.counts.cut


def test_the_matrix_has_500_runs_over_40_structures() -> None:
    assert len(STRUCTURES) >= 40
    assert len(all_runs()) >= 500
    assert len({run.structure for run in selection(SELECTED)}) == SELECTED

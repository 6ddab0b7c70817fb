"""Blocks of a model that drafts: what stays valid, who gets them if they are short, no leak."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from baton_engine.scheduling.sequence import BlockNaming, RequestState, Sequence, Submission
from baton_engine.speculation.draft_kv import DraftBlocks, DraftKV
from baton_protocol.hashing import extend_hashes
from baton_protocol.ids import BlockHash
from tests.support.engines.demands import kv_layout
from tests.support.engines.engine_core import make_request

BLOCK = 4
LAYOUT = kv_layout(block=BLOCK)
ROOT = BlockHash(bytes(16))


def sequence_of(prompt: Seq[int], *, arrival: int = 1, choice: int = 0) -> Sequence:
    request = make_request(f"r{arrival}", prompt, n=choice + 1)
    state = RequestState(
        request,
        BlockNaming(ROOT, LAYOUT),
        arrival=arrival,
        given_hashes=extend_hashes(ROOT, request.prompt_ids, BLOCK),
        submission=Submission(),
    )
    return Sequence(state, choice)


def take(kv: DraftKV, *asked: tuple[Sequence, int]) -> list[Any]:
    """The number of tokens with KV of each sequence, or None."""
    held = kv.take([sequence for sequence, _ in asked], [length for _, length in asked])
    kv.check_integrity()
    return [each and each.computed for each in held]


def compute(kv: DraftKV, sequence: Sequence, drafts: Seq[int] = ()) -> DraftBlocks:
    """Take blocks, and compute all known tokens and the drafts."""
    [held] = kv.take([sequence], [sequence.known + len(drafts)])
    assert held is not None
    kv.note_computed(sequence, sequence.known - held.computed)
    for draft in drafts:
        kv.note_computed(sequence, 1, (draft,))
    return held


@pytest.mark.parametrize(
    ("drafts", "tokens", "computed"),
    [
        ((7, 8, 9), (7, 8, 9, 1), 13),
        ((7, 8, 9), (7, 8, 1), 12),
        ((7, 8, 9), (7, 1), 11),
        ((7, 8, 9), (1,), 10),
        ((7, 8, 9), (7, 8, 9), 12),  # the last known token is left to compute
        ((), (1, 2, 3), 10),
    ],
)
def test_drafts_that_became_tokens_keep_their_kv(
    drafts: Seq[int], tokens: Seq[int], computed: int
) -> None:
    kv, sequence = DraftKV(9, LAYOUT), sequence_of(range(10))
    compute(kv, sequence, drafts)
    for id in tokens:
        sequence.append_token(id)
    assert take(kv, (sequence, sequence.known + 3)) == [computed]
    kv.forget(sequence)
    kv.check_integrity()
    assert kv.num_free == kv.num_blocks


def test_a_launch_that_is_repeated_computes_the_last_token_again() -> None:
    kv, sequence = DraftKV(9, LAYOUT), sequence_of(range(10))
    compute(kv, sequence, (7, 8))
    assert take(kv, (sequence, 12)) == [9]


def test_another_choice_finds_the_full_blocks_of_the_same_tokens() -> None:
    kv, first = DraftKV(20, LAYOUT), sequence_of(range(10))
    compute(kv, first, (7,))
    other, longer = sequence_of(range(10), choice=1), sequence_of(range(15), arrival=2)
    assert take(kv, (other, 12), (longer, 17)) == [8, 8]
    kv.forget(first)
    assert take(kv, (sequence_of(range(9), arrival=3), 9)) == [8]
    assert take(kv, (sequence_of(range(8), arrival=4), 9)) == [4]  # one token is left to compute
    assert take(kv, (sequence_of((0, 1, 2, 3, 5, 5), arrival=5), 9)) == [4]


def test_blocks_of_drafts_are_not_found_by_others() -> None:
    kv, first = DraftKV(20, LAYOUT), sequence_of(range(10))
    compute(kv, first, (10, 11, 12))
    assert take(kv, (sequence_of(range(13), arrival=2), 13)) == [8]
    for id in (10, 11, 12):
        first.append_token(id)
    kv.take([first], [13])
    kv.note_computed(first, 1)
    assert take(kv, (sequence_of(range(13), arrival=3), 13)) == [12]


def test_the_least_recently_used_sequence_gives_its_blocks_first() -> None:
    kv = DraftKV(6, LAYOUT)
    old, middle, young = (sequence_of([n] * 8, arrival=n) for n in (1, 2, 3))
    for each in (middle, old, young):
        compute(kv, each)
    new = sequence_of([4] * 8, arrival=4)
    assert take(kv, (new, 8)) == [0]
    assert take(kv, (old, 8)) == [7]
    # The blocks of `middle` were taken. The two others have not used theirs since then.
    assert take(kv, (middle, 8), (old, 9)) == [0, 7]
    assert take(kv, (young, 8)) == [0]


def test_a_sequence_takes_no_blocks_of_an_older_one_that_drafts_now() -> None:
    kv = DraftKV(5, LAYOUT)
    old, young = sequence_of([1] * 8, arrival=1), sequence_of([2] * 8, arrival=2)
    compute(kv, young)
    assert take(kv, (young, 9), (old, 9)) == [None, 0]
    kv.note_computed(old, 8)
    assert take(kv, (young, 8), (old, 9)) == [7, 7]
    assert take(kv, (young, 80), (old, 9)) == [None, 7]
    for sequence in (old, young):
        kv.forget(sequence)
    assert kv.num_free == 5

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from baton_engine.scheduling.sequence import BlockNaming, RequestState, Submission
from baton_engine.scheduling.sequence import Sequence as EngineSequence
from baton_engine.speculation.lookup import PromptLookup, SuffixLookup, TokenArrays
from baton_protocol.ids import BlockHash
from tests.support.engines.demands import kv_layout
from tests.support.engines.engine_core import make_request


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3]),  # no further than there are tokens
        ([1, 2, 9, 4, 1, 2, 3], 2, []),  # 3 occurs for the first time
        ([5, 3, 8, 2, 3, 9, 2, 3], 1, [9]),  # the longer match wins over the last one
        ([2, 3, 7, 2, 3, 9, 2, 3], 1, [9]),  # the last of two equal ones
        ([7, 3, 8, 3], 2, []),  # one equal token is fewer than 2
        ([3, 3, 3, 3], 2, [3]),
        ([4], 2, []),
        ([1, 2, 3, 4, 5, 1, 2, 3], 3, [4, 5, 1]),
    ],
)
def test_prompt_lookup(tokens: Sequence[int], most: int, drafts: Sequence[int]) -> None:
    assert PromptLookup(2, 3).after(np.array(tokens, np.int32), most) == drafts


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        # After 1, 2 came 3 twice and 4 once; after 1, 2, 3 came 5 and 6, and the later one wins.
        ([1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 1, 2], 2, [3, 6]),
        ([1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 1, 2], 1, [3]),
        ([7, 8, 9, 4, 8], 5, [9]),  # as many as the match has tokens
        ([7, 8, 9, 4, 5], 5, []),
        ([2, 2, 2, 2], 5, [2]),
    ],
)
def test_suffix_lookup(tokens: Sequence[int], most: int, drafts: Sequence[int]) -> None:
    lookup = SuffixLookup(longest=8, factor=1.0, least_share=0.3)
    assert lookup.after(np.array(tokens, np.int32), most) == drafts


def test_the_array_of_a_sequence_grows_with_it_and_is_forgotten() -> None:
    naming = BlockNaming(BlockHash(bytes(16)), kv_layout(block=4))
    state = RequestState(
        make_request("a", [5, 6, 7]), naming, arrival=1, given_hashes=(), submission=Submission()
    )
    arrays, sequence = TokenArrays(), EngineSequence(state, 0)
    for id in range(20):
        assert arrays.of(sequence).tolist() == sequence.tokens
        sequence.append_token(id)
    arrays.forget(sequence)
    assert arrays.of(sequence).tolist() == sequence.tokens


def test_suffix_drafts_end_where_too_few_occurrences_agree() -> None:
    tokens = np.array([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2], np.int32)
    assert SuffixLookup(longest=8, factor=1.0, least_share=0.3).after(tokens, 2) == [5, 1]
    assert SuffixLookup(longest=8, factor=1.0, least_share=0.4).after(tokens, 2) == []

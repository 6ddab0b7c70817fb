"""Trees of drafts: their expected tokens, and which is the fastest."""

from __future__ import annotations

import pytest

from benchmarks.support.engine.draft_trees import StepSeconds, best_chain, best_tree

FREE = StepSeconds([1.0] * 5, 0.0)
DEAR = StepSeconds([1.0 + 0.4 * drafts for drafts in range(5)], 0.0)


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_a_chain_has_the_tokens_of_its_rates(most: int) -> None:
    chain = best_chain([[0.8, 0.1]] * most, FREE)
    assert (chain.drafts, chain.depth) == (most, most)
    assert chain.tokens == pytest.approx(sum(0.8**place for place in range(most + 1)))


def test_a_tree_has_the_drafts_with_the_largest_chances() -> None:
    """Four of 0.5, 0.25, 0.25, 0.15, 0.125 and less."""
    tree = best_tree([[0.5, 0.25], [0.5, 0.3]], FREE)
    assert (tree.drafts, tree.depth) == (4, 2)
    assert tree.tokens == pytest.approx(1 + 0.5 + 0.25 + 0.25 + 0.15)


def test_a_second_candidate_pays_if_rows_cost_nothing_and_not_if_they_cost_much() -> None:
    rates = [[0.4, 0.2], [0.3, 0.2]]
    assert best_tree(rates, FREE).speed > 1.1 * best_chain(rates, FREE).speed
    assert best_tree(rates, DEAR) == best_chain(rates, DEAR)


def test_the_steps_of_the_head_count_by_position() -> None:
    slow_head = StepSeconds([1.0] * 5, 1.0)
    assert best_chain([[0.9]] * 4, slow_head).drafts == 0
    fast_head = StepSeconds([1.0] * 5, 0.5)
    assert best_chain([[0.9]] * 4, fast_head).drafts == 3
    tree = best_tree([[0.9, 0.05]] * 4, fast_head)
    assert (tree.drafts, tree.depth) == (4, 2)

"""The limits of a step's size while the device lacks memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.step_limits import GROW_AFTER, StepLimits


def limits_after(*lacking: tuple[int, int]) -> tuple[int, int]:
    """(tokens, seqs) after steps of (tokens, running sequences) that did not fit."""
    limits = StepLimits(2048, 256)
    for tokens, seqs in lacking:
        assert limits.lower(tokens, seqs)
    return limits.tokens, limits.seqs


def test_prompts_get_fewer_tokens_before_a_sequence_is_taken_away() -> None:
    assert limits_after((2048, 100)) == (1024, 256)
    assert limits_after((2048, 100), (1024, 100), (512, 100), (256, 100)) == (128, 256)
    assert limits_after((128, 100)) == (100, 256)
    assert limits_after((100, 100)) == (99, 99)
    assert limits_after((300, 1)) == (150, 256)


def test_one_token_of_one_sequence_cannot_be_lowered() -> None:
    limits = StepLimits(2048, 256)
    assert not limits.lower(1, 1)
    assert (limits.tokens, limits.seqs) == (2048, 256)


def test_the_limits_grow_while_steps_fit_and_not_beyond_the_settings() -> None:
    limits = StepLimits(40, 9)
    limits.lower(8, 8)
    for fitted, expected in (
        (GROW_AFTER - 1, (7, 7)),
        (1, (14, 8)),
        (GROW_AFTER, (28, 9)),
        (GROW_AFTER, (40, 9)),
        (GROW_AFTER, (40, 9)),
    ):
        for _ in range(fitted):
            limits.fit()
        assert (limits.tokens, limits.seqs) == expected


def test_a_step_that_does_not_fit_starts_the_count_of_fitting_steps_again() -> None:
    limits = StepLimits(64, 8)
    limits.lower(64, 4)
    for _ in range(GROW_AFTER - 1):
        limits.fit()
    limits.lower(32, 4)
    limits.fit()
    assert limits.tokens == 16


@given(tokens=st.integers(1, 5000), seqs=st.integers(1, 300), data=st.data())
def test_lowering_ends_at_one_token_of_one_sequence(
    tokens: int, seqs: int, data: st.DataObject
) -> None:
    limits = StepLimits(8192, 512)
    steps = 0
    while limits.lower(tokens, seqs):
        tokens = data.draw(st.integers(1, max(limits.tokens, min(seqs, limits.seqs))))
        seqs = min(seqs, limits.seqs)
        steps += 1
    assert (tokens, seqs) == (1, 1)
    assert steps <= 13 + 2 * 300

"""What the runner is asked in a step.

In: a scheduled piece of a sequence. Out: its Row: tokens, blocks, and, where the piece completes
what is known, a sample for each choice that goes on from there. Pure.
"""

from __future__ import annotations

from baton_engine.api import EngineInfo, PromptAsk, Row, Sample
from baton_engine.scheduler import Piece
from baton_engine.sequence import Sequence


def make_row(piece: Piece, info: EngineInfo) -> Row:
    sequence, start = piece.sequence, piece.sequence.computed
    end = start + piece.count
    samples = _samples(sequence, info) if end == sequence.known else ()
    return Row(
        sequence.tokens[start:end],
        start,
        sequence.blocks,
        samples,
        _prompt_ask(sequence, start, end),
    )


def _samples(sequence: Sequence, info: EngineInfo) -> tuple[Sample, ...]:
    """All choices that sample here have the same tokens: several only where none has outputs."""
    state = sequence.state
    banned = state.bans.ids(
        info.eos_ids,
        sequence.tokens,
        num_outputs=sequence.num_outputs,
        vocab_size=info.vocab_size,
    )
    return tuple(
        Sample(choice, sequence.known, state.params, banned, sequence.seen, state.listed)
        for choice in state.choices_with(sequence)
    )


def _prompt_ask(sequence: Sequence, start: int, end: int) -> PromptAsk | None:
    state = sequence.state
    targets = state.request.prompt_ids[start + 1 : end + 1]
    if not state.asks_prompt or not targets:
        return None
    top = state.params.prompt_logprobs
    assert top is not None
    return PromptAsk(targets, top)

"""The runner's input for a step.

In: scheduled pieces of sequences. Out: one Row per piece with its tokens and blocks. If the piece
reaches the sequence's last known token, the row also has one sample for each choice that continues
there, and one after each of the piece's drafts. Each sequence records how far the step computes and
which sample is its next token. A pooling request has no samples: the row asks for its vector, and
the sequence awaits that.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from baton_engine.interface import EngineInfo, OwnChanges, PenaltyCounts, PromptAsk, Row, Sample
from baton_engine.scheduling.scheduler import Piece
from baton_engine.scheduling.sequence import Sequence
from baton_protocol.sampling import MAX_BAD_WORD_IDS

UNREAD = (0,)  # placeholder for a token that a step in flight samples


def make_rows(pieces: Seq[Piece], info: EngineInfo, step: int) -> list[Row]:
    """Make the rows of step number `step`, one per piece, and update the sequences."""
    rows: list[Row] = []
    sampled = 0
    for piece in pieces:
        sequence = piece.sequence
        sequence.last_step = step
        if sequence.takes_short_path and not piece.drafts:
            rows.append(_decode(sequence))
            sequence.launched += 1
            sequence.awaited_sample = sampled
            sampled += 1
            continue
        row = _row(piece, info)
        rows.append(row)
        asks = row.samples or row.pooling is not None
        sequence.note_launch(piece.count, sampled if asks else -1)
        if piece.drafts:
            sequence.launch_limit = 0  # which tokens follow is known when this step is read
        sampled += len(row.samples)
    return rows


def _decode(sequence: Sequence) -> Row:
    """Same as _row() for a sequence that takes the short path, in a quarter of the time."""
    state, start, after = sequence.state, sequence.launched, sequence.awaited_sample
    sample = Sample(sequence.choice, start + 1, state.params, (), None, state.listed)
    key, speculates = sequence.blocks_id, sequence.acceptance is not None
    if after < 0:
        tokens = sequence.tokens[-1:]
        return Row(tokens, start, sequence.blocks, (sample,), None, None, key, speculates)
    return Row(UNREAD, start, sequence.blocks, (sample,), None, after, key, speculates)


def _row(piece: Piece, info: EngineInfo) -> Row:
    sequence, start = piece.sequence, piece.sequence.launched
    if piece.drafts:
        tokens = (*sequence.tokens[start:], *piece.drafts)
        samples = (*_samples(sequence, start + 1, info), *_samples_after(sequence, piece, info))
        key = sequence.blocks_id
        return Row(tokens, start, sequence.blocks, samples, blocks_id=key, speculates=True)
    awaits = sequence.awaited_sample >= 0
    end, known = start + piece.count, len(sequence.tokens) + awaits
    if (pooling := sequence.state.request.pooling) is not None:
        return Row(
            *(sequence.tokens[start:end], start, sequence.blocks),
            blocks_id=sequence.blocks_id,
            pooling=pooling if end == known else None,
        )
    return Row(
        UNREAD if awaits else sequence.tokens[start:end],
        start,
        sequence.blocks,
        _samples(sequence, known, info) if end == known else (),
        _prompt_ask(sequence, start, end),
        sequence.awaited_sample if awaits else None,
        sequence.blocks_id,
        sequence.acceptance is not None,
    )


def _samples(sequence: Sequence, known: int, info: EngineInfo) -> tuple[Sample, ...]:
    """One sample per choice that samples here. Several choices sample here only if none of them
    has outputs, so all have the same tokens and the same banned ids."""
    state = sequence.state
    banned = state.bans.ids(
        info.eos_ids,
        sequence.tokens,
        num_outputs=known - state.prompt_len,
        vocab_size=info.vocab_size,
        matcher=sequence.matcher,
    )
    own = None
    if state.changes:
        prompt = state.request.prompt_ids
        own = OwnChanges(state.changes, prompt, tuple(sequence.tokens[len(prompt) :]))
    return tuple(
        Sample(
            choice,
            known,
            state.params,
            banned,
            sequence.penalty_counts,
            state.listed,
            sequence.matcher,
            own,
        )
        for choice in state.choices_with(sequence)
    )


def _samples_after(sequence: Sequence, piece: Piece, info: EngineInfo) -> list[Sample]:
    """The sample after each draft of the piece, as if the drafts up to it were known tokens."""
    state, choice, known = sequence.state, sequence.choice, sequence.known
    last = sequence.tokens[-MAX_BAD_WORD_IDS:]  # bans depend on no earlier token
    counts, matcher = sequence.penalty_counts, sequence.matcher
    samples = []
    for number, id in enumerate(piece.drafts, start=1):
        last.append(id)
        if counts is not None:
            outputs = {**counts.outputs, id: counts.outputs.get(id, 0) + 1}
            counts = PenaltyCounts(counts.prompt, outputs)
        if matcher is not None:
            matcher = matcher.copy()
            matcher.accept((id,))
        banned = state.bans.ids(
            info.eos_ids,
            last,
            num_outputs=sequence.num_outputs + number,
            vocab_size=info.vocab_size,
            matcher=matcher,
        )
        samples.append(
            Sample(choice, known + number, state.params, banned, counts, state.listed, matcher)
        )
    return samples


def _prompt_ask(sequence: Sequence, start: int, end: int) -> PromptAsk | None:
    state = sequence.state
    targets = state.request.prompt_ids[start + 1 : end + 1]
    if not state.asks_prompt or not targets:
        return None
    top = state.params.prompt_logprobs
    assert top is not None
    return PromptAsk(targets, top)

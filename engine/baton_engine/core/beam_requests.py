"""Requests with beam search: fork their sequences, and report their answers at the end.

In: the likeliest next tokens of each beam. Out: sequences that continue the beams, and at the end
the tokens of all answers at once.

A beam is a sequence. When all beams of a request have their next tokens, the search chooses the
next beams (see `scheduling.beam_search`). Of the beams that continue the same one, the first keeps
its sequence; the others are forks of it, which share its full blocks and copy the last one.

A search reports nothing before its end, and what it finds depends on the prompt and the parameters
alone. So a request that is placed again begins at its prompt, and reports what its earlier attempt
has not.
"""

from __future__ import annotations

from baton_engine.core.requests import RunningRequests
from baton_engine.interface import Complete, Sampled, StepResult, TokenOut
from baton_engine.scheduling.beam_search import Answer, LiveBeams, NextBeam
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import RequestState, Sequence
from baton_protocol.request import PositionLogprobs


class BeamRequests:
    def __init__(self, scheduler: Scheduler, requests: RunningRequests) -> None:
        self._scheduler = scheduler
        self._requests = requests

    def take(
        self, state: RequestState, beams: LiveBeams, choice: int, token: Sampled, result: StepResult
    ) -> None:
        """A beam has its next tokens. If all beams have them, continue the search."""
        if state.prefill_only:  # the decode node begins the search
            self._requests.end(state, choice, linger=state.keeps_blocks)
            return
        assert token.logprobs is not None, "a beam's samples ask for logprobs"
        state.live[choice].idle = True
        if not beams.take(choice, token.logprobs.top):
            return
        following = beams.advance()
        if following:
            self._continue(state, beams, following)
            return
        for choice in list(state.live):
            self._requests.end(state, choice, linger=state.keeps_blocks)
        for choice, answer in enumerate(beams.search.answers):
            if choice not in state.finished:
                _report(state, choice, answer, result)

    def _continue(self, state: RequestState, beams: LiveBeams, following: list[NextBeam]) -> None:
        """Replace the request's sequences by those of its next beams."""
        sequences = [state.live[choice] for choice in beams.choices]
        kept = {each.parent for each in following}
        for index, sequence in enumerate(sequences):
            if index not in kept:
                self._requests.end(state, sequence.choice)
        unused = (choice for choice in range(state.params.n) if choice not in state.live)
        beams.choices = []
        extended: list[tuple[Sequence, int]] = []
        for parent, id in following:
            sequence = sequences[parent]
            if parent in kept:
                kept.discard(parent)
                extended.append((sequence, id))
                beams.choices.append(sequence.choice)
                continue
            fork = Sequence.fork(sequence, next(unused), id)
            beams.choices.append(fork.choice)
            extended.append((fork, -1))
        for sequence, id in extended:
            if id >= 0:
                sequence.append_token(id)
                sequence.forked_from = None
            state.live[sequence.choice] = sequence
            self._scheduler.resume(sequence)


def _report(state: RequestState, choice: int, answer: Answer, result: StepResult) -> None:
    """Report the tokens of an answer that an earlier attempt has not reported."""
    request, top = state.request, state.request.params.logprobs
    known = len(request.outputs[choice]) if request.outputs else 0
    positions = answer.beam.positions()
    last = len(positions) - 1
    if known > last:
        result.complete.append(
            Complete(
                *(request.id, request.attempt, choice, len(positions)),
                answer.finish,
                answer.stop_id,
            )
        )
    for offset, position in enumerate(positions[known:], start=known):
        shown = None if top is None else PositionLogprobs(position.sampled, position.top[:top])
        end = (answer.finish, answer.stop_id) if offset == last else (None, None)
        result.tokens.append(
            TokenOut(
                *(request.id, request.attempt, choice, offset, position.sampled.id), shown, *end
            )
        )

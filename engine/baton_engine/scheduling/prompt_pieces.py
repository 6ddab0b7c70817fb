"""How many tokens of each prompt a step computes.

In: the prompts of one step, in the order in which they get tokens. Out: the size of each one's
piece, 0 if the step computes none of it.
"""

from __future__ import annotations

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.scheduling.sequence import Sequence

# Most tokens that a step computes of a prompt whose chunks are published. The chunks of a step are
# published while the next one runs, so larger pieces would leave more of the transfer to the end.
PUBLISHED_PIECE = 2048


class PromptPieces:
    """The pieces of one step. `alone` says that there is one sequence in all: as in vLLM, the
    threshold does not hold for it. A prompt in one piece is cut only in a step without other
    tokens: then no later step has more room. With `uncut` prompts, it is larger than the step's
    limit there."""

    def __init__(self, options: SchedulingOptions, *, alone: bool, uncut: bool = False) -> None:
        self._uncut = uncut
        self.whole = uncut or not options.enable_chunked_prefill
        self._threshold = 0 if alone else options.long_prefill_token_threshold
        self._partial, self._long = (
            options.max_num_partial_prefills,
            options.max_long_partial_prefills,
        )
        # Without limits each prompt gets a piece while there is budget.
        self.limited = self.whole or self._partial is not None or self._long is not None

    def size(self, sequence: Sequence, due: int, budget: int, *, first: bool) -> int:
        """The tokens of a sequence with `due` tokens to compute. `first`: nothing else is in the
        step."""
        if self.whole:
            if due > budget and not first:
                return 0
            return due if self._uncut else min(due, budget)
        size = min(due, budget, PUBLISHED_PIECE if sequence.state.track else budget)
        if 0 < self._threshold < due:
            if self._long == 0:
                return 0
            size = min(size, self._threshold)
        return 0 if size < due and self._partial == 0 else size

    def take(self, sequence: Sequence, due: int, budget: int, *, first: bool) -> int:
        """The same, for a sequence that gets its tokens in this step."""
        size = self.size(sequence, due, budget, first=first)
        if size and self._long is not None and 0 < self._threshold < due:
            self._long -= 1
        if 0 < size < due and self._partial is not None:
            self._partial -= 1
        return size

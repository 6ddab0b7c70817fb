"""How large a step may be: the settings' limits, lowered while the device lacks memory.

In: the tokens and sequences of steps that did not fit the device's memory, and steps that did. Out:
the most tokens and sequences of the next step.

Memory can be short for a long time (a profiled step that was too small) or for a while (another
process on the card). So the limits rise again, a step of growth for every GROW_AFTER steps that
fit: a step that does not fit costs about as much time as one that does.
"""

from __future__ import annotations

GROW_AFTER = 64


class StepLimits:
    """`tokens` and `seqs` are the limits now."""

    def __init__(self, tokens: int, seqs: int) -> None:
        self._most = tokens, seqs
        self.tokens, self.seqs = tokens, seqs
        self._fitted = 0

    def lower(self, tokens: int, seqs: int) -> bool:
        """A step of `tokens` tokens did not fit, while `seqs` sequences were running. First halves
        the tokens, down to one per sequence, which delays only prompts; then takes away a
        sequence. Returns False for one token of one sequence: nothing is smaller."""
        self._fitted = 0
        if tokens > seqs:
            self.tokens = max(seqs, tokens // 2)
        elif seqs > 1:
            self.tokens = self.seqs = seqs - 1
        else:
            return False
        return True

    def fit(self) -> None:
        """A step fitted."""
        if (self.tokens, self.seqs) == self._most:
            return
        self._fitted += 1
        if self._fitted == GROW_AFTER:
            self._fitted = 0
            tokens, seqs = self._most
            self.tokens = min(tokens, 2 * self.tokens)
            self.seqs = min(seqs, self.seqs + 1)

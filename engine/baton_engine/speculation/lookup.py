"""Proposers that look the last tokens of a sequence up in its earlier ones.

In: a sequence's prompt and outputs. Out: what followed there. No model.

Shapes: T tokens of the sequence, P places in them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton_engine.scheduling.sequence import Sequence

Tokens = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]


class TokenArrays:
    """The tokens of sequences as arrays, which grow with them: a step converts only the new ones,
    because to convert 8,000 takes 0.3 ms."""

    def __init__(self) -> None:
        self._arrays: dict[Sequence, Tokens] = {}
        self._lengths: dict[Sequence, int] = {}

    def of(self, sequence: Sequence) -> Tokens:
        known, filled = sequence.known, self._lengths.get(sequence, 0)
        array = self._arrays.get(sequence)
        if array is None or known > len(array):
            array = np.empty(2 * known, np.int32)
            filled = 0
            self._arrays[sequence] = array
        array[filled:known] = sequence.tokens[filled:known]
        self._lengths[sequence] = known
        return array[:known]

    def forget(self, sequence: Sequence) -> None:
        self._arrays.pop(sequence, None)
        self._lengths.pop(sequence, None)


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """What followed the last occurrence of the sequence's last n tokens, for the largest n in
    [least, longest] for which they occurred before."""

    least: int
    longest: int
    known: TokenArrays = field(default_factory=TokenArrays)

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        return [
            self.after(self.known.of(sequence), length)
            for sequence, length in zip(sequences, most, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        self.known.forget(sequence)

    def after(self, tokens_T: Tokens, most: int) -> list[int]:
        places_P, matched = occurrences(tokens_T, self.longest)
        if matched < self.least:
            return []
        following: list[int] = tokens_T[places_P[-1] : places_P[-1] + most].tolist()
        return following


def occurrences(tokens_T: Tokens, longest: int) -> tuple[Places, int]:
    """The places after each earlier occurrence of the last n tokens, ascending, and n: the largest
    up to `longest` for which there is one (0: the last token did not occur before)."""
    end = len(tokens_T) - 1
    places_P = np.flatnonzero(tokens_T[:end] == tokens_T[end]) + 1
    matched = min(len(places_P), 1)
    while matched and matched < longest:
        longer_P = places_P[places_P > matched]
        longer_P = longer_P[tokens_T[longer_P - 1 - matched] == tokens_T[end - matched]]
        if not len(longer_P):
            break
        places_P, matched = longer_P, matched + 1
    return places_P, matched


@dataclass(frozen=True, slots=True)
class SuffixLookup:
    """Of all earlier occurrences of the longest end of the sequence, at most `longest` tokens, the
    tokens that followed most often, the later one of two that followed equally often. Drafts end
    where the share of the occurrences that follow them falls below `least_share`, and are at most
    `factor` times as many as the end has tokens."""

    longest: int
    factor: float
    least_share: float
    known: TokenArrays = field(default_factory=TokenArrays)

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        return [
            self.after(self.known.of(sequence), length)
            for sequence, length in zip(sequences, most, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        self.known.forget(sequence)

    def after(self, tokens_T: Tokens, most: int) -> list[int]:
        places_P, matched = occurrences(tokens_T, self.longest)
        total, drafts = len(places_P), list[int]()
        while len(drafts) < min(most, int(self.factor * matched)):
            places_P = places_P[places_P < len(tokens_T)]
            ids, firsts, counts = np.unique(
                tokens_T[places_P[::-1]], return_index=True, return_counts=True
            )
            if not len(ids) or counts.max() < self.least_share * total:
                break
            best = np.lexsort((firsts, -counts))[0]
            drafts.append(int(ids[best]))
            places_P = places_P[tokens_T[places_P] == ids[best]] + 1
        return drafts

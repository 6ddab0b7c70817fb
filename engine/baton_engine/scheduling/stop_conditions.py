"""Rules for when a choice ends, and which ids are banned as its next token.

In: sampled ids. Out: finish reasons, banned ids. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.interface import Matcher
from baton_protocol.errors import GrammarDeadEnd
from baton_protocol.sampling import FinishReason, SamplingParams

SHOWN = 200  # characters of a grammar in an error


class BannedTokens:
    """Ids that a request's parameters ban as the next token of a choice: ids that would end it
    before min_tokens, and the last ids of bad words whose beginning it has just generated.

    Made once per request. Bad words are grouped by their beginning, so a step looks up only those
    that match the end of the outputs.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._allowed = frozenset(params.allowed_token_ids or ())
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for word in params.bad_words:
            self._ends[word[:-1]].append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._ends})

    def ids(
        self,
        eos_ids: tuple[int, ...],
        tokens: Sequence[int],
        *,
        num_outputs: int,
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> tuple[int, ...]:
        """Ids banned after `tokens`, of which the last `num_outputs` are the choice's outputs.

        If the bans left no id to sample, nothing is banned.
        """
        params, banned = self._params, list[int]()
        if num_outputs < params.min_tokens:
            banned += () if params.ignore_eos else eos_ids
            banned += params.stop_token_ids
        for length in self._lengths:
            if length > num_outputs:
                break
            banned += self._ends.get(tuple(tokens[len(tokens) - length :]), ())
        if not banned:
            return ()
        if matcher is not None:
            mask = matcher.mask()
            left = int.from_bytes(mask, "little").bit_count()
            left -= sum(permits(mask, id) for id in set(banned))
            return tuple(banned) if left > 0 else ()
        allowed = self._allowed
        left = len(allowed.difference(banned)) if allowed else vocab_size - len(set(banned))
        return tuple(banned) if left else ()


@dataclass(frozen=True, slots=True)
class End:
    """How a choice ends. `stop_id` is the EOS or stop id that ends it, which is not part of its
    text; None if it ends without one."""

    finish: FinishReason
    stop_id: int | None = None


def end_of(
    params: SamplingParams,
    eos_ids: tuple[int, ...],
    id: int,
    *,
    num_outputs: int,
    room: int,
    matcher: Matcher | None = None,
) -> End | None:
    """How a choice ends with `id`, its output number `num_outputs` (from 1); None if it goes on.

    `room` is the number of further tokens that the engine could take. On the last allowed token,
    EOS counts as "stop" and a stop id as "length" (as in vLLM). `matcher` has accepted `id`. With
    a grammar, "stop" means that the text matches: a stop id within the text does not end it. Raise
    GrammarDeadEnd if the text does not match and nothing may follow.
    """
    may_stop = num_outputs > params.min_tokens
    if matcher is not None and matcher.error:
        raise _dead_end(params, matcher.error, num_outputs)
    if may_stop and not params.ignore_eos and id in eos_ids:
        return End("stop", id)
    if num_outputs >= params.max_tokens or room <= 0:
        return End("stop" if matcher is not None and _is_whole(matcher, eos_ids) else "length")
    if may_stop and id in params.stop_token_ids and (matcher is None or matcher.complete):
        return End("stop", id)
    if matcher is None or not matcher.stopped:
        return None
    if not matcher.complete:
        raise _dead_end(params, "nothing may follow", num_outputs)
    return End("stop")


def _is_whole(matcher: Matcher, eos_ids: tuple[int, ...]) -> bool:
    """Whether a text is complete and nothing but EOS may follow."""
    if not matcher.complete:
        return False
    if matcher.stopped:
        return True
    mask = matcher.mask()
    follow = int.from_bytes(mask, "little").bit_count()
    return follow == sum(permits(mask, id) for id in eos_ids)


def _dead_end(params: SamplingParams, why: str, num_outputs: int) -> GrammarDeadEnd:
    grammar = params.structured.grammar if params.structured is not None else ""
    shown = grammar if len(grammar) <= SHOWN else f"{grammar[:SHOWN]}..."
    return GrammarDeadEnd(
        f"the grammar allows nothing after {num_outputs} tokens of the answer, which does not match"
        f" it yet: {why}; the grammar is {shown}"
    )


def permits(mask: bytes, id: int) -> bool:
    """Whether a matcher's mask (see Matcher.mask) permits this id."""
    return id // 8 < len(mask) and bool(mask[id // 8] >> id % 8 & 1)

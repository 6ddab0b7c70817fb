"""Rules for when a choice ends, banned ids, and the collector of a step's results.

In: sampled ids. Out: finish reasons, banned ids, StepResult. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from baton_engine.interface import (
    Complete,
    Failed,
    Filled,
    Matcher,
    Progress,
    PromptUse,
    StepResult,
    TokenOut,
)
from baton_protocol.ids import RequestId
from baton_protocol.sampling import SamplingParams

Finish = Literal["stop", "length"]


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


def finish_of(
    params: SamplingParams, eos_ids: tuple[int, ...], id: int, *, num_outputs: int, room: int
) -> Finish | None:
    """Why a choice ends with `id`, its output number `num_outputs` (from 1); None if it goes on.

    `room` is the number of further tokens that the engine could take. On the last allowed token,
    EOS counts as "stop" and a stop id as "length" (as in vLLM).
    """
    may_stop = num_outputs > params.min_tokens
    if may_stop and not params.ignore_eos and id in eos_ids:
        return "stop"
    if num_outputs >= params.max_tokens or room <= 0:
        return "length"
    return "stop" if may_stop and id in params.stop_token_ids else None


def grammar_finish(matcher: Matcher) -> Finish | None:
    """Why a choice ends with the last token that its matcher accepted; None if it goes on. "stop"
    if the text is complete and nothing can follow, "length" if the matcher reports an error."""
    if not matcher.stopped:
        return None
    return "length" if matcher.error else "stop"


def permits(mask: bytes, id: int) -> bool:
    """Whether a matcher's mask (see Matcher.mask) permits this id."""
    return id // 8 < len(mask) and bool(mask[id // 8] >> id % 8 & 1)


@dataclass(slots=True)
class Totals:
    """Counters since the engine started. NodeLoad has the same names with the suffix `_total`."""

    engine_steps: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    host_prompt_tokens: int = 0
    fetched_prompt_tokens: int = 0
    generated_tokens: int = 0

    def figures(self) -> dict[str, int]:
        """The counters as fields of NodeLoad."""
        return {f"{name}_total": value for name, value in asdict(self).items()}


@dataclass(slots=True)
class Outcome:
    """Collects the fields of a StepResult while a step's results are applied."""

    ended: list[RequestId]
    complete: list[Complete]
    failed: list[Failed] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    prompts: list[PromptUse] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_seqs: int = 0

    def add_to(self, totals: Totals) -> None:
        totals.engine_steps += self.num_tokens > 0
        totals.generated_tokens += len(self.tokens)
        totals.computed_prompt_tokens += self.num_prompt_tokens
        for use in self.prompts:
            totals.prompt_tokens += use.prompt
            totals.cached_prompt_tokens += use.cached
            totals.host_prompt_tokens += use.host
            totals.fetched_prompt_tokens += use.fetched

    def result(self) -> StepResult:
        return StepResult(
            tokens=tuple(self.tokens),
            progress=tuple(self.progress),
            filled=tuple(self.filled),
            prompts=tuple(self.prompts),
            complete=tuple(self.complete),
            finished=tuple(self.ended),
            failed=tuple(self.failed),
            num_tokens=self.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_seqs=self.num_seqs,
        )

"""One request of the offline API while it runs.

In: its tokens, in order. Out: the RequestOutputs that its caller asked for.

The owner calls take() for each token, and output() when the caller may have one: what has come in
the meantime is one output. So a slow caller gets fewer outputs and loses nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from baton_engine.interface import TokenOut
from baton_engine.offline.model_text import ModelText, detokenizer_of, needed, with_texts
from baton_engine.offline.outputs import (
    CompletionOutput,
    EndReason,
    RequestOutput,
    RequestStateStats,
)
from baton_engine.offline.parameters import OutputOptions, RequestOutputKind, wire_params
from baton_engine.offline.prompts import GivenPrompt, Prompt
from baton_protocol.errors import BatonError
from baton_protocol.ids import RequestId
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from baton_text.detokenizer import Detokenizer

SEED_BITS = 63


@dataclass(slots=True)
class RunningChoice:
    """One choice while it runs. `sent_ids` and `sent_chars` are how much of it earlier outputs
    had."""

    detokenizer: Detokenizer | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish: EndReason | None = None
    stop_reason: str | int | None = None
    sent_ids: int = 0
    sent_chars: int = 0
    sent_end: bool = False
    _text: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        whole = "".join(self._text)
        self._text = [whole]
        return whole

    def take(self, token: TokenOut, params: SamplingParams) -> bool:
        """Add a token of a choice that runs. Returns True if a stop string ended it before the
        engine did."""
        self.ids.append(token.id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
            self.cumulative_logprob += token.logprobs.sampled.logprob
        if token.finish is not None:
            self.finish = token.finish
            self.stop_reason = token.stop_id if token.stop_id in params.stop_token_ids else None
        if self.detokenizer is None:
            return False
        if token.stop_id is None or params.include_stop_str_in_output:
            self._text.append(self.detokenizer.push([token.id]).text)
        if token.finish is not None:
            self._text.append(self.detokenizer.finish())
        if self.detokenizer.stopped is None or token.finish == "length":
            return False  # the length limit takes precedence, as in vLLM
        self.finish, self.stop_reason = "stop", self.detokenizer.stopped
        return token.finish is None

    def has_news(self, interval: int) -> bool:
        """Whether an output is due: with the first token, with every `interval` more, and with the
        end."""
        if self.finish is not None:
            return not self.sent_end
        new = len(self.ids) - self.sent_ids
        return new >= interval or (new > 0 and self.sent_ids == 0)


@dataclass(slots=True)
class RunningRequest:
    """One request. Make it with prepare()."""

    request: Request
    given_id: str  # the id that the caller knows
    prompt: str | None
    options: OutputOptions
    text: ModelText | None
    choices: list[RunningChoice]
    stats: RequestStateStats
    cached_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    error: BatonError | None = None
    _sent_prompt: bool = False

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def ended(self) -> bool:
        return self.error is not None or all(choice.finish for choice in self.choices)

    @property
    def is_due(self) -> bool:
        """Whether output() returns something now."""
        if self.ended:
            return True
        if self.options.kind is RequestOutputKind.FINAL_ONLY:
            return False
        return any(choice.has_news(self.options.interval) for choice in self.choices)

    def note_started(self, now: float) -> None:
        """A step computes the first of its tokens, from `now` on (monotonic clock)."""
        self.stats.scheduled_ts = now

    def note_prompt(self, cached: int, logprobs: tuple[PositionLogprobs, ...]) -> None:
        """The prompt is computed."""
        self.cached_tokens, self.prompt_logprobs = cached, logprobs

    def take(self, token: TokenOut, now: float) -> bool:
        """Add a token that came at `now` (monotonic clock), unless an earlier one has ended the
        choice. Returns True if a stop string ended the choice before the engine did."""
        choice, stats = self.choices[token.choice], self.stats
        if choice.finish is not None:
            return False
        if not stats.num_generation_tokens:
            stats.first_token_ts = now
            stats.first_token_latency = now - stats.queued_ts
        stats.num_generation_tokens += 1
        stats.last_token_ts = now
        return choice.take(token, self.request.params)

    def abort(self) -> None:
        """The caller has ended the request."""
        for choice in self.choices:
            choice.finish = choice.finish or "abort"

    def output(self) -> RequestOutput | None:
        """The output that is due, None if none is."""
        if not self.is_due:
            return None
        whole = self.options.kind is not RequestOutputKind.DELTA
        interval = 1 if self.ended else self.options.interval
        outputs = [
            self._choice_output(index, choice, whole=whole)
            for index, choice in enumerate(self.choices)
            if whole or choice.has_news(interval)
        ]
        logprobs = None
        if self.request.params.prompt_logprobs is not None and (whole or not self._sent_prompt):
            logprobs = [None, *with_texts(self.text, self.prompt_logprobs)]
            self._sent_prompt = True
        return RequestOutput(
            request_id=self.given_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.request.prompt_ids),
            outputs=outputs,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=logprobs,
            finished=self.ended,
            metrics=replace(self.stats),
            error=self.error,
        )

    def _choice_output(self, index: int, choice: RunningChoice, *, whole: bool) -> CompletionOutput:
        text = choice.text
        ids, chars = (0, 0) if whole else (choice.sent_ids, choice.sent_chars)
        choice.sent_ids, choice.sent_chars = len(choice.ids), len(text)
        choice.sent_end = choice.finish is not None
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=text[chars:],
            token_ids=choice.ids[ids:],
            finish_reason=choice.finish,
            stop_reason=choice.stop_reason,
            logprobs=list(with_texts(self.text, choice.logprobs[ids:])) if asked else None,
            cumulative_logprob=choice.cumulative_logprob if asked else None,
        )


class RequestMaker:
    """Makes RunningRequests of one engine. With a `seed`, the seeds of requests that have none
    follow from it, in the order of the requests."""

    def __init__(
        self, text: ModelText | None, *, seed: int | None = None, stream_interval: int = 1
    ) -> None:
        self.text = text
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._interval = stream_interval

    def make(
        self,
        id: RequestId,
        given_id: str,
        prompt: Prompt,
        params: SamplingParams,
        times: tuple[float, float],
        *,
        continues_prompt: bool = True,
        priority: int = 0,
    ) -> RunningRequest:
        """`times` are now, as Unix time and on the monotonic clock. Raises InvalidRequest for
        wrong parameters, and ModelError if the model has no text and needs one."""
        options = OutputOptions.of(params, self._interval)
        params = wire_params(params)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(SEED_BITS))
        given = GivenPrompt.of(prompt)
        ids = given.ids
        if ids is None:
            tokenizer = needed(self.text, "a prompt of text").tokenizer
            ids = tuple(tokenizer.encode(given.text or ""))
        request = Request(
            id=id,
            attempt=0,
            prompt_ids=ids,
            params=params,
            outputs=((),) * params.n,
            salt=given.salt,
            continues_prompt=continues_prompt,
            priority=priority,
        )
        return RunningRequest(
            request=request,
            given_id=given_id,
            prompt=given.text,
            options=options,
            text=self.text,
            choices=[RunningChoice(detokenizer_of(self.text, request)) for _ in range(params.n)],
            stats=RequestStateStats(arrival_time=times[0], queued_ts=times[1]),
        )

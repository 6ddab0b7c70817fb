"""What an engine can run at all. Only this module rejects a request permanently.

In: a Request. Out: nothing, or an error that names the limit. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from baton_engine.interface import Complete, EngineInfo, Matcher
from baton_engine.scheduling.stop_conditions import end_of
from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.pooling import PoolingParams
from baton_protocol.request import Request
from baton_protocol.sampling import ALL_LOGPROBS, check_message, logprobs_within

# What a pooling model answers with, and the routes that ask for it.
GIVES = {"embed": "vectors", "classify": "scores of classes"}
ROUTES = {"embed": "/v1/embeddings", "classify": "/score or /rerank"}


class RequestLimits:
    """`max_tokens` is the maximum length of a choice, prompt and outputs together.

    The last token of a sequence needs no KV, so a sequence may have one token more than the pool's
    blocks hold. It may start with blocks for all its tokens in each group of layers, so windows do
    not raise the limit. The whole pool is always enough for one sequence of that length. No
    sequence is ever stuck, and its maximum length does not depend on other requests.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.vocab_size = info.vocab_size
        self.eos_ids = info.eos_ids
        self._max_logprobs = info.max_logprobs
        self._pooling, self._vector_size = info.pooling, info.vector_size
        room = info.layout.tokens_in(info.num_blocks)
        self.max_tokens = min(info.max_model_len, room + 1)
        self._most_pooled = min(info.max_model_len, room)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest or PromptTooLong for a request that can never run here."""
        params, outputs, prompt = request.params, request.outputs, request.prompt_ids
        self.check_kind(request)
        params.check()
        self.with_counts(request)
        if not prompt:
            raise InvalidRequest("the prompt is empty; at least 1 token", param="prompt")
        if outputs and len(outputs) != params.n:
            raise ValueError(f"request {request.id} has {len(outputs)} outputs for n={params.n}")
        for field, ids in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
            ("logit_bias", [id for id, _ in params.logit_bias]),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", [id for word in params.bad_words for id in word]),
        ):
            self._check_ids(field, ids)
        if request.pooling is not None:
            self._check_pooling(request, request.pooling)
            return
        if len(prompt) >= self.max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; at most {self.max_tokens - 1} fit, so that "
                "there is room for 1 new token",
                param="prompt",
            )
        known = len(prompt) + max((len(ids) for ids in outputs), default=0)
        if known > self.max_tokens:
            raise PromptTooLong(
                f"prompt and outputs have {known} tokens; the limit is {self.max_tokens}",
                param="prompt",
            )

    def check_kind(self, request: Request) -> None:
        """Raise InvalidRequest if the request asks for tokens, and this is a pooling model, or the
        other way round."""
        if self._pooling and request.pooling is None:
            raise InvalidRequest(
                f"this model answers with {GIVES[self._pooling]} and generates no tokens; use"
                f" {ROUTES[self._pooling]}, or start the nodes with --runner generate",
                param="model",
            )
        if request.pooling is not None and not self._pooling:
            raise InvalidRequest(
                "this model generates tokens and has no vectors or scores; use another model, or"
                " start the nodes with --runner pooling",
                param="model",
            )

    def _check_pooling(self, request: Request, pooling: PoolingParams) -> None:
        prompt, params, most = len(request.prompt_ids), request.params, self._most_pooled
        if prompt > most:
            raise PromptTooLong(
                f"the input has {prompt} tokens; at most {most} fit", param="prompt"
            )
        samples = params.n > 1 or params.use_beam_search or params.structured is not None
        if samples or params.prompt_logprobs is not None or any(request.outputs):
            raise InvalidRequest(
                "a request for a vector samples no tokens: leave out n, beam search, structured"
                " output, prompt_logprobs and outputs",
                param="n",
            )
        if not 0 <= pooling.second_text < prompt:
            raise InvalidRequest(
                f"second_text is {pooling.second_text}, and the input has {prompt} tokens; give the"
                " place of one of them, or 0 for a single text",
                param="second_text",
            )
        if pooling.dimensions is None:
            return
        if self._pooling == "classify":
            raise InvalidRequest(
                f"dimensions is {pooling.dimensions}, and this model has the scores of"
                f" {self._vector_size} classes, which cannot be cut; leave it out",
                param="dimensions",
            )
        if not 1 <= pooling.dimensions <= self._vector_size:
            raise InvalidRequest(
                f"dimensions is {pooling.dimensions}; this model's vectors have"
                f" {self._vector_size}: use 1 to {self._vector_size}",
                param="dimensions",
            )

    def with_counts(self, request: Request) -> Request:
        """The request with the numbers of logprobs that -1 stands for. Raise InvalidRequest for
        more than the engine gives."""
        params = request.params
        counts = {
            name: logprobs_within(name, value, self._max_logprobs, self.vocab_size)
            for name in ("logprobs", "prompt_logprobs")
            if (value := getattr(params, name)) is not None
        }
        if ALL_LOGPROBS in (params.logprobs, params.prompt_logprobs):
            params = msgspec.structs.replace(params, **counts)
            request = msgspec.structs.replace(request, params=params)
        check_message(params)
        return request

    def _check_ids(self, field: str, ids: Collection[int]) -> None:
        for id in (min(ids), max(ids)) if ids else ():
            if not 0 <= id < self.vocab_size:
                raise InvalidRequest(
                    f"{field} holds token id {id}, which is not in the vocabulary "
                    f"(0..{self.vocab_size - 1})",
                    param=field,
                )

    def complete(
        self, request: Request, choice: int, matcher: Matcher | None = None
    ) -> Complete | None:
        """How a choice ended that was submitted with all its tokens; None if more are to come.
        Raise GrammarDeadEnd if none may follow although the grammar needs more."""
        outputs = request.outputs[choice] if request.outputs else ()
        if not outputs:
            return None
        last, count = outputs[-1], len(outputs)
        room = self.max_tokens - len(request.prompt_ids) - count
        if matcher is not None:
            matcher = matcher.copy()
            matcher.accept(outputs)
        end = end_of(
            request.params, self.eos_ids, last, num_outputs=count, room=room, matcher=matcher
        )
        if end is None:
            return None
        return Complete(request.id, request.attempt, choice, count, end.finish, end.stop_id)

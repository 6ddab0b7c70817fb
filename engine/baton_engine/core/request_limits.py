"""What an engine can run at all. Only this module rejects a request permanently.

In: a Request. Out: nothing, or an error that names the limit. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from baton_engine.interface import Complete, EngineInfo, Matcher
from baton_engine.scheduling.stop_conditions import end_of
from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.request import Request
from baton_protocol.sampling import ALL_LOGPROBS, check_message, logprobs_within


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
        room = info.layout.tokens_in(info.num_blocks)
        self.max_tokens = min(info.max_model_len, room + 1)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest or PromptTooLong for a request that can never run here."""
        params, outputs, prompt = request.params, request.outputs, request.prompt_ids
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

"""Ids to what a client sees: text, stop strings, logprobs with their texts.

In: tokens of one choice, in order. Out: one Delta per token. Ids go out as generated; text may lag
behind. The token that completes a stop string is the choice's last; what the engine computed beyond
it is dropped, neither sent nor counted. On the last token that the limits allow a stop string is
still cut off, but the finish is "length" (as vLLM has it).
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_node.ipc.messages import Token
from baton_protocol.link import Delta, FinishReason
from baton_protocol.request import Request
from baton_text.detokenizer import Detokenizer, context_of
from baton_text.logprobs import named
from baton_text.tokenizer import Tokenizer


def context(tokenizer: Tokenizer, request: Request) -> tuple[int, ...]:
    """The ids that each choice's text continues; computed once per request, since a long prompt of
    tokens that are not shown is looked through whole."""
    if not request.continues_prompt:
        return ()
    return context_of(tokenizer, request.prompt_ids, request.params.skip_special_tokens)


class ChoiceText:
    """One choice of one request. `known` are ids whose text somebody else has sent; `context` is
    that of context()."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        known: Sequence[int],
        context: Sequence[int] = (),
    ) -> None:
        params = request.params
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
                known=known,
                min_ids=params.min_tokens,
                context=context,
            )

    def push(self, token: Token) -> Delta:
        """The delta of one token; its `finish` is set if the choice ends with it."""
        ids = () if token.id is None else (token.id,)
        text = "" if self._detokenizer is None else self._text(self._detokenizer, token, ids)
        finish, stop = self._end(token)
        logprobs = () if token.logprobs is None else named(self._tokenizer, (token.logprobs,))
        place = (token.request, token.attempt, token.choice, token.offset)
        return Delta(*place, ids, text, logprobs, finish, stop)

    def _text(self, detokenizer: Detokenizer, token: Token, ids: Sequence[int]) -> str:
        text = ""
        if token.stop_id is None or self._request.params.include_stop_str_in_output:
            text = detokenizer.push(ids).text  # else the id ends the text, unseen
        return text if token.finish is None else text + detokenizer.finish()

    def _end(self, token: Token) -> tuple[FinishReason | None, str | int | None]:
        if token.finish == "length":
            return "length", None
        if self._detokenizer is not None and self._detokenizer.stopped is not None:
            return "stop", self._detokenizer.stopped
        known = token.stop_id is not None and token.stop_id in self._request.params.stop_token_ids
        return token.finish, token.stop_id if known else None

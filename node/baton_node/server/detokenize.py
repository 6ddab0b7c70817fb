"""Turns one choice's token ids into deltas: text, stop strings, logprobs with their texts.

In: the choice's tokens, in order. Out: one Delta per token. Each delta has its token's id; its text
may lag behind. The token that completes a stop string is the choice's last: the caller drops the
tokens after it. If the last token that the length limit allows completes a stop string, the string
is cut off, but the finish reason is "length", as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.interface import Complete, TokenOut
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import FinishReason
from baton_text.detokenizer import Detokenizer, context_of
from baton_text.logprobs import add_token_texts
from baton_text.tokenizer import Tokenizer


def context(tokenizer: Tokenizer, request: Request) -> tuple[int, ...]:
    """Return the last ids of the prompt that each choice's text continues; () for an answer that
    starts a new text. Compute it once per request: it can read a whole long prompt if its tokens
    have no text."""
    if not request.continues_prompt:
        return ()
    return context_of(tokenizer, request.prompt_ids, request.params.skip_special_tokens)


class ChoiceText:
    """The text of one choice. `known` are its ids whose text was already sent, perhaps by another
    node. `context` is the result of context()."""

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

    def push(self, token: TokenOut | Complete) -> Delta:
        """Return the delta of the next token, or of the end of a choice without a new token. Its
        `finish` is set if the choice ends with it."""
        ids: tuple[int, ...] = ()
        logprobs: tuple[PositionLogprobs, ...] = ()
        if isinstance(token, TokenOut):
            ids = (token.id,)
            if token.logprobs is not None:
                logprobs = add_token_texts(self._tokenizer, (token.logprobs,))
        text, stopped = "", None
        if self._detokenizer is not None:
            text = self._text(self._detokenizer, token)
            stopped = self._detokenizer.stopped
        finish: FinishReason | None = token.finish
        stop: str | int | None = None
        if finish is not None or stopped is not None:
            finish, stop = self._end(token, stopped)
        place = (token.request, token.attempt, token.choice, token.offset)
        vector = token.vector if isinstance(token, Complete) else b""
        return Delta(*place, ids, text, logprobs, finish, stop, vector=vector)

    def _text(self, detokenizer: Detokenizer, token: TokenOut | Complete) -> str:
        text = ""
        # A stop id is not shown unless the client asks.
        shown = token.stop_id is None or self._request.params.include_stop_str_in_output
        if shown and isinstance(token, TokenOut):
            text = detokenizer.push_id(token.id)
        return text if token.finish is None else text + detokenizer.finish()

    def _end(
        self, token: TokenOut | Complete, stopped: str | None
    ) -> tuple[FinishReason | None, str | int | None]:
        """How the choice ends; `stopped` is the stop string that its text has."""
        if token.finish == "length":
            return "length", None
        if stopped is not None:
            return "stop", stopped
        is_asked = token.stop_id in self._request.params.stop_token_ids
        return token.finish, token.stop_id if is_asked else None

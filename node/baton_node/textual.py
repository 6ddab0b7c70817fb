"""Ids to what a client sees: text, stop strings, logprobs with their texts.

In: tokens of one choice, in order. Out: one Delta per token. Ids go out as generated; text may lag
behind. The token that completes a stop string is the choice's last; what the engine computed beyond
it is dropped, neither sent nor counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_node.frames import Token
from baton_protocol.link import Delta, FinishReason
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_text.detokenizer import Detokenizer
from baton_text.tokenizer import Tokenizer


class ChoiceText:
    """One choice of one request. `known` are ids whose text somebody else has sent."""

    def __init__(self, tokenizer: Tokenizer, request: Request, known: Sequence[int]) -> None:
        params = request.params
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            known=known,
            min_ids=params.min_tokens,
        )

    def push(self, token: Token) -> Delta:
        """The delta of one token; its `finish` is set if the choice ends with it."""
        text = ""
        if token.stop_id is None or self._request.params.include_stop_str_in_output:
            text = self._detokenizer.push([token.id]).text  # else the id ends the text, unseen
        if token.finish is not None:
            text += self._detokenizer.finish()
        finish: FinishReason | None = token.finish
        stop: str | int | None = None
        if self._detokenizer.stopped is not None:
            finish, stop = "stop", self._detokenizer.stopped
        elif token.stop_id in self._request.params.stop_token_ids:
            stop = token.stop_id
        return Delta(
            request=token.request,
            attempt=token.attempt,
            choice=token.choice,
            offset=token.offset,
            ids=(token.id,),
            text=text,
            logprobs=(self._named(token.logprobs),) if token.logprobs is not None else (),
            finish=finish,
            stop=stop,
        )

    def _named(self, logprobs: PositionLogprobs) -> PositionLogprobs:
        top = tuple(self._name(candidate) for candidate in logprobs.top)
        return PositionLogprobs(self._name(logprobs.sampled), top)

    def _name(self, candidate: TokenLogprob) -> TokenLogprob:
        return TokenLogprob(
            id=candidate.id,
            logprob=candidate.logprob,
            rank=candidate.rank,
            text=self._tokenizer.token_text(candidate.id),
            raw=self._tokenizer.token_bytes(candidate.id),
        )

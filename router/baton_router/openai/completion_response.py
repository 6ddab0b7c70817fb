"""The JSON of /v1/completions' answers: `text_completion` objects.

In: deltas, or the choices they have come to. Out: bytes. With `echo` a choice's text (in a stream,
its first chunk's) begins with the prompt, and its logprobs with the prompt's. With
`return_token_ids` each choice (in a stream, its first chunk) has the `prompt_token_ids`, and each
choice or chunk its `token_ids`; with `prompt_logprobs` each choice has those. All three are null
where nobody asked for them, as in vLLM.

A token's `text_offset` follows from the ids alone, as the text does, whichever nodes they came from
in which deltas. Text behind a stop string is cut off: an answer in one piece has the tokens there
at its end; a stream, which has told of them before, where they would have been.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs
from baton_router.openai.echo import Echo
from baton_router.openai.endpoint import (
    ChoiceOutput,
    EventWriter,
    Head,
    Json,
    Options,
    PromptIds,
    Usage,
    finish_members,
    prompt_positions,
)
from baton_router.openai.logprobs import completion_logprobs, prompt_logprobs
from baton_text.detokenizer import context_of
from baton_text.offsets import TextOffsets
from baton_text.tokenizer import Tokenizer

Positions = Sequence[PositionLogprobs]
NO_IDS = b',"prompt_token_ids":null,"token_ids":null'


class CompletionShape:
    """One answer's JSON. `echoes` are the prompts as they are shown, None where they are not;
    `prompt_logprobs` is how many the client asked for by that name. Remembers which choices have
    begun, and how much text there is of those whose tokens are told with their offsets."""

    def __init__(
        self,
        head: Head,
        options: Options,
        sampling: Json,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        *,
        echoes: Sequence[Echo] | None,
        prompt_logprobs: int | None,
    ) -> None:
        self._head = head
        self._n: int = sampling.get("n", 1)
        self._logprobs: int | None = sampling.get("logprobs")
        self._prompt_logprobs = prompt_logprobs
        self._skip_special: bool = sampling["skip_special_tokens"]
        self._has_text: bool = sampling["detokenize"]
        self._ids = options.return_token_ids
        self._names_are_ids = options.token_id_names
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._plain = self._logprobs is None and echoes is None
        self._scores: dict[int, Positions] = {}  # by prompt
        self._begun: set[int] = set()
        self._contexts: dict[int, tuple[int, ...]] = {}  # by prompt
        self._offsets: dict[int, TextOffsets] = {}
        counts = [len(ids) for ids in prompts for _ in range(self._n)]
        self._writer = EventWriter(head, "text_completion", options, counts)

    def event(self, index: int, delta: Delta) -> bytes:
        self._writer.count(index, delta)
        if self._plain and not self._ids:
            shown = delta.text or delta.finish
            return self._writer.text_event(index, delta, NO_IDS) if shown else b""
        begins = index not in self._begun
        self._begun.add(index)
        if delta.prompt_logprobs:
            self._scores[index // self._n] = delta.prompt_logprobs
        if self._plain:
            return self._writer.text_event(index, delta, self._id_members(index, delta, begins))
        echo = self._echo(index) if begins else None
        if not (delta.text or delta.finish or echo or self._ids or self._logprobs is not None):
            return b""
        text = delta.text if echo is None else echo.text + delta.text
        parts = [b'{"index":%d,"text":' % index, msgspec.json.encode(text), b',"logprobs":']
        if self._logprobs is None:
            parts.append(b"null")
        else:
            if begins:
                self._offsets[index] = self._answer_offsets(index)
            scores = self._scores.get(index // self._n, ())
            told = self._told(echo, scores, delta.logprobs, self._logprobs, self._offsets[index])
            parts.append(msgspec.json.encode(told))
        parts.append(self._id_members(index, delta, begins))
        parts.append(finish_members(delta))
        return self._writer.event(index, b"".join(parts))

    def usage_event(self, usage: Usage) -> bytes:
        return self._writer.usage_event(usage)

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        told: list[Json] = []
        for start in range(0, len(choices), self._n):
            mine = choices[start : start + self._n]
            scores = prompt_positions(mine)
            told += [self._choice(start + i, choice, scores) for i, choice in enumerate(mine)]
        body: Json = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": told,
            "usage": usage.json(),
            "system_fingerprint": self._head.fingerprint,
        }
        return msgspec.json.encode(body)

    def _choice(self, index: int, choice: ChoiceOutput, scores: Positions) -> Json:
        echo = self._echo(index)
        text = choice.text if echo is None else echo.text + choice.text
        told: Json = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompts[index // self._n] if self._ids else None,
            "token_ids": choice.ids if self._ids else None,
        }
        if self._logprobs is not None:
            offsets = self._answer_offsets(index)
            shown = self._told(echo, scores, choice.logprobs, self._logprobs, offsets)
            shown["text_offset"] = [min(offset, len(text)) for offset in shown["text_offset"]]
            told["logprobs"] = shown
        if self._prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(scores, self._prompt_logprobs)
        return told

    def _id_members(self, index: int, delta: Delta, begins: bool) -> bytes:
        """`prompt_token_ids` and `token_ids` of a stream's choice."""
        if not self._ids:
            return NO_IDS
        prompt = self._prompts[index // self._n] if begins else None
        members = (b',"prompt_token_ids":', msgspec.json.encode(prompt), b',"token_ids":')
        return b"".join((*members, msgspec.json.encode(delta.ids)))

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._n] if self._echoes is not None else None

    def _answer_offsets(self, index: int) -> TextOffsets:
        """Of the tokens behind the prompt, before the first of them."""
        echo, prompt = self._echo(index), index // self._n
        if prompt not in self._contexts:  # a long prompt of special ids is looked through whole
            ids = self._prompts[prompt]
            self._contexts[prompt] = context_of(self._tokenizer, ids, self._skip_special)
        before = 0 if echo is None else len(echo.text)
        return TextOffsets(self._tokenizer, self._skip_special, self._contexts[prompt], before)

    def _told(
        self,
        echo: Echo | None,
        scores: Positions,
        positions: Positions,
        top: int,
        offsets: TextOffsets,
    ) -> Json:
        if self._has_text:
            own = [offsets.push(position.sampled.id) for position in positions]
        else:
            own = [offsets.length] * len(positions)
        as_ids = self._names_are_ids
        if echo is None:
            return completion_logprobs(positions, top, own, as_id=as_ids)
        whole, all_offsets = [*scores, *positions], [*echo.offsets, *own]
        return completion_logprobs(whole, top, all_offsets, echo.first, as_ids)

"""A model as the router needs it: tokenizer, chat template, parsers and grammars, from its files.

In: the files that a node serves (see `model_store`). Out: a PoolModel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton_protocol.pooling import Pooling
from baton_router.nodes.model_grammars import AnswerRules, ModelGrammars, Value
from baton_text.artifacts import TOKENIZER_CONFIG, load_json
from baton_text.chat import ChatTemplate
from baton_text.defaults import generation_defaults
from baton_text.grammars.constraints import Kind as GrammarKind
from baton_text.parsers.parser import ReasoningParser, ToolParser
from baton_text.parsers.registry import parsers_of
from baton_text.tokenizer import LONG_TEXT, Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolModel:
    """A model as the router needs it. `defaults` are the sampling defaults in its
    generation_config, `tokenizer_config` its tokenizer_config.json. The parsers read its tool calls
    and reasoning; None if it has none or their format is unknown. `pooling` is what its nodes
    answer with if they generate no tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: dict[str, Any]
    tool_parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    grammars: ModelGrammars = field(default_factory=ModelGrammars)
    pooling: Pooling = ""

    @classmethod
    def from_files(cls, artifacts: dict[str, bytes]) -> PoolModel:
        """Raise ArtifactError for a file that cannot be used."""
        template = ChatTemplate.from_artifacts(artifacts)
        tool_parser, reasoning_parser = parsers_of(artifacts, template.source)
        return cls(
            tokenizer=Tokenizer.from_artifacts(artifacts),
            template=template,
            defaults=generation_defaults(artifacts),
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            tokenizer_config=load_json(artifacts, TOKENIZER_CONFIG),
        )

    async def grammar(self, kind: GrammarKind, value: Value) -> str:
        """See ModelGrammars.text."""
        return await self.grammars.text(self.tokenizer, kind, value)

    async def answer_grammar(self, rules: AnswerRules) -> str:
        """See ModelGrammars.answer."""
        return await self.grammars.answer(self.tokenizer, rules)

    async def encode(
        self, text: str, max_tokens: int, *, add_special_tokens: bool
    ) -> tuple[list[int], bool]:
        """See Tokenizer.encode_up_to."""
        return await _encode_off_loop(
            self.tokenizer.encode_up_to, text, max_tokens, add_special_tokens
        )

    async def encode_last(
        self, text: str, max_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        """See Tokenizer.encode_last."""
        return await _encode_off_loop(
            self.tokenizer.encode_last, text, max_tokens, add_special_tokens
        )


async def _encode_off_loop(
    encode: Callable[[str, int, bool], T], text: str, max_tokens: int, special: bool
) -> T:
    """Encode a long text in a thread. A short one takes a few milliseconds of the event loop."""
    if len(text) <= LONG_TEXT:
        return encode(text, max_tokens, special)
    return await asyncio.to_thread(encode, text, max_tokens, special)

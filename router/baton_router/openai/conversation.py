"""A call whose prompt is a conversation, rendered by the model's chat template.

Each dialect of conversations reads its own body into a subclass, which also shapes the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answer_pieces import AnswerPieces
from baton_router.openai.answers import CommonFields
from baton_router.openai.call import (
    GENERATES,
    Json,
    Options,
    Prompt,
    Tasks,
    TextPrompt,
    Truncation,
)
from baton_router.openai.reasoning import RequestedReasoning
from baton_router.openai.structured_output import RequestedGrammar
from baton_router.openai.tools import RequestedTools, calls_size
from baton_text.tokenizer import Tokenizer

MESSAGE_CHARS = 30  # cost of rendering a message, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """All of a Call but its shape. `messages` are in the form that templates take (see `messages`).
    `special_tokens_requested`: the client set `skip_special_tokens`."""

    options: Options
    sampling: Json
    bad_words: tuple[str, ...]
    special_tokens_requested: bool
    grammar: RequestedGrammar | None
    tools: RequestedTools | None
    reasoning: RequestedReasoning
    messages: list[Json]
    template_kwargs: Json
    add_generation_prompt: bool
    add_special_tokens: bool
    continues_prompt: bool
    truncation: Truncation | None
    priority: int
    names: Mapping[str, str]
    default_max_tokens: int | None = None

    @property
    def tasks(self) -> Tasks:
        return GENERATES

    @property
    def rendered(self) -> Sequence[int]:
        documents = self.template_kwargs.get("documents")
        size = (
            sum(
                MESSAGE_CHARS + len(message["content"]) + calls_size(f"messages[{at}]", message)
                for at, message in enumerate(self.messages)
            )
            + (len(msgspec.json.encode(documents)) if documents else 0)
            + (0 if self.tools is None else self.tools.size)
        )
        return (size,)

    def forget_prompts(self) -> None:
        self.messages.clear()
        self.template_kwargs.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        text = model.template.render(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continues_prompt,
            tools=None if self.tools is None else self.tools.template_forms(),
            **{**self.reasoning.kwargs, **self.template_kwargs},
        )
        return [TextPrompt(text, self.add_special_tokens)]

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> AnswerParsing | None:
        [prompt] = prompts
        assert isinstance(prompt, TextPrompt), "a template makes text"
        final = self.messages[-1]["content"] if self.continues_prompt else None
        return AnswerParsing.for_chat(
            model, self.tools, self.reasoning, self.grammar, prompt.text, final
        )

    def pieces(
        self, common: CommonFields, tokenizer: Tokenizer, parsing: AnswerParsing | None
    ) -> AnswerPieces:
        """What splits the answer's text into reasoning, content and calls."""
        return AnswerPieces(
            parsing,
            tokenizer,
            self.sampling,
            common.id,
            special_tokens_requested=self.special_tokens_requested,
        )

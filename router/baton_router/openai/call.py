"""A parsed body and the writer of its answer, the same for every dialect: one handler serves all.

Call     a parsed body: prompts, sampling parameters, and how to answer
Options  how to answer
Shape    turns deltas into the dialect's JSON: events of a stream, or one answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_protocol.pooling import Pooling, PoolingParams
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.fields.generation import AS_FITS, GenerationFields, StreamOptions
from baton_router.openai.structured_output import RequestedGrammar
from baton_text.tokenizer import Tokenizer

Json = dict[str, Any]
PromptIds = Sequence[tuple[int, ...]]  # per prompt
# What may answer a call, with the parameters for it; a model that generates needs none.
Tasks = Mapping[Pooling, PoolingParams | None]
GENERATES: Tasks = {"": None}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """`pair` is a second text, which the tokenizer joins with the first as its model expects."""

    text: str
    add_special_tokens: bool
    pair: str | None = None


Prompt = TextPrompt | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of each prompt are kept, from its end or its start. `tokens` None: as many as
    fit beside `max_tokens`. 0 leaves no prompt and is refused later."""

    tokens: int | None
    keeps_last: bool

    @classmethod
    def from_fields(cls, fields: GenerationFields) -> Truncation | None:
        tokens = fields.truncate_prompt_tokens
        if tokens is None:
            return None
        return cls(None if tokens == AS_FITS else tokens, fields.truncation_side != "right")

    def may_have_cut(self, ids: Sequence[int]) -> bool:
        """Whether `ids` may be a truncated prompt."""
        return self.tokens is None or len(ids) >= self.tokens


@dataclass(slots=True, kw_only=True)
class Options:
    """How to answer. `token_id_names`: logprobs name tokens `token_id:7`. `generates` is False if
    the call only asks about its prompt."""

    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    token_id_names: bool = False
    generates: bool = True

    @classmethod
    def from_fields(cls, fields: GenerationFields, *, generates: bool = True) -> Options:
        usage = fields.stream_options or StreamOptions()
        return cls(
            model=fields.model,
            stream=fields.stream,
            include_usage=usage.include_usage,
            continuous_usage=usage.include_usage and usage.continuous_usage_stats,
            return_token_ids=fields.return_token_ids,
            token_id_names=fields.return_tokens_as_token_ids,
            generates=generates,
        )

    def add_usage(self) -> None:
        """Show the usage in each event of a stream, whatever the client asked for."""
        self.include_usage = self.continuous_usage = True


class Shape(Protocol):
    """Writes the JSON of one call. `index` numbers all choices of the call: prompt * n + choice."""

    def event(self, index: int, delta: Delta) -> bytes:
        """The SSE bytes of one delta; empty if it shows nothing yet."""
        ...

    def end(self, usage: Usage | None) -> bytes:
        """The last SSE bytes of a stream that did not fail; `usage` if `Options.include_usage`."""
        ...

    def error_event(self, error: ErrorRecord) -> bytes:
        """The last SSE bytes of a stream that failed."""
        ...

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes: ...


class Call(Protocol):
    """A parsed body. `bad_words` are texts; `sampling` holds the other fields as SamplingParams has
    them. `default_max_tokens` None: as many as the context leaves."""

    @property
    def options(self) -> Options: ...

    @property
    def tasks(self) -> Tasks:
        """What may answer the call; any other model refuses it."""
        ...

    @property
    def sampling(self) -> Json: ...

    @property
    def bad_words(self) -> tuple[str, ...]: ...

    @property
    def grammar(self) -> RequestedGrammar | None:
        """The grammar that each answer must match, if any."""
        ...

    @property
    def special_tokens_requested(self) -> bool:
        """Whether the client itself said if its text has special tokens."""
        ...

    @property
    def default_max_tokens(self) -> int | None: ...

    @property
    def truncation(self) -> Truncation | None:
        """None: refuse a prompt that is too long."""
        ...

    @property
    def priority(self) -> int:
        """Lower ones go first."""
        ...

    @property
    def continues_prompt(self) -> bool:
        """The value for Request.continues_prompt."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names of SamplingParams fields and of the prompt, where they differ."""
        ...

    @property
    def rendered(self) -> Sequence[int]:
        """Approximate number of characters of each prompt that prompts() has to make."""
        ...

    def prompts(self, model: PoolModel) -> list[Prompt]:
        """The prompts, in the order of the answer's choices. Raise TextTooLong."""
        ...

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> AnswerParsing | None:
        """How to parse the answers to these prompts; None if they are plain text."""
        ...

    def forget_prompts(self) -> None:
        """The prompts are ids now: free the texts that the answer does not repeat."""
        ...

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> Shape: ...

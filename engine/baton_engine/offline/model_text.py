"""What the offline API knows of a model's text: tokenizer, chat template, default parameters.

baton_text is imported when a model has text. A folder without a tokenizer, or `text` None, accepts
token ids only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton_engine.errors import ModelError
from baton_engine.offline.parameters import SamplingParams
from baton_protocol.request import PositionLogprobs, Request
from baton_text.gguf.header import is_gguf

if TYPE_CHECKING:
    from baton_text.chat import ChatTemplate
    from baton_text.detokenizer import Detokenizer
    from baton_text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer, chat template and default sampling parameters."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: Mapping[str, float | int]

    @classmethod
    def from_artifacts(cls, artifacts: Mapping[str, bytes]) -> ModelText:
        """Raises ArtifactError."""
        from baton_text.chat import ChatTemplate
        from baton_text.defaults import generation_defaults
        from baton_text.tokenizer import Tokenizer

        return cls(
            Tokenizer.from_artifacts(artifacts),
            ChatTemplate.from_artifacts(artifacts),
            generation_defaults(artifacts),
        )


def has_text(model: Path) -> bool:
    """Whether a model's folder or file has a tokenizer."""
    return is_gguf(model) or (model / "tokenizer.json").is_file()


def read_text(
    model: Path, chat_template: Path | str | None = None, tokenizer: Path | None = None
) -> ModelText | None:
    """Read a model's text; None if it has no tokenizer. For the arguments see read_artifacts.
    Raises ArtifactError."""
    if tokenizer is None and not has_text(model):
        return None
    from baton_text.artifacts import read_artifacts

    return ModelText.from_artifacts(read_artifacts(model, chat_template, tokenizer))


def needed(text: ModelText | None, what: str) -> ModelText:
    """Raises ModelError if the model has no tokenizer."""
    if text is None:
        raise ModelError(f"{what} needs tokenizer.json in the model folder; give token ids")
    return text


def default_params(text: ModelText | None) -> SamplingParams:
    """The defaults of the model's generation_config.json, and SamplingParams' own for the rest."""
    return SamplingParams() if text is None else msgspec.convert(text.defaults, SamplingParams)


def chat_prompt(
    text: ModelText | None, messages: Sequence[Message], values: Mapping[str, Any]
) -> list[int]:
    """The ids of a conversation. `values` are the keyword arguments of ChatTemplate.render."""
    known = needed(text, "a chat")
    rendered = known.template.render(messages, **values)
    return known.tokenizer.encode(rendered, add_special_tokens=False)


def detokenizer_of(text: ModelText | None, request: Request) -> Detokenizer | None:
    """The detokenizer of one choice; None if nobody asks for text, or the model has none. Raises
    ModelError."""
    params = request.params
    if text is None:
        if params.stop:
            raise ModelError("stop strings need tokenizer.json in the model folder")
        return None
    if not params.detokenize:
        return None
    from baton_text.detokenizer import Detokenizer, context_of

    skip = params.skip_special_tokens
    before = request.prompt_ids if request.continues_prompt else ()
    return Detokenizer(
        text.tokenizer,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special=skip,
        min_ids=params.min_tokens,
        context=context_of(text.tokenizer, before, skip),
    )


def with_texts(
    text: ModelText | None, positions: Sequence[PositionLogprobs]
) -> Sequence[PositionLogprobs]:
    """Add the tokens' texts to logprobs, if the model has a tokenizer."""
    if text is None or not positions:
        return positions
    from baton_text.logprobs import add_token_texts

    return add_token_texts(text.tokenizer, positions)

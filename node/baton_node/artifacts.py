"""The small files of a node's model, such as its tokenizer and chat template.

The server process serves them to routers; the engine process compiles grammars for their tokenizer.

In: settings. Out: the artifacts and their tokenizer. Raises SetupError for mistakes that the user
can correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from baton_node.errors import SetupError
from baton_node.settings import NodeSettings
from baton_text.artifacts import ArtifactError, byte_artifacts, read_artifacts
from baton_text.parsers.registry import parsers_artifact
from baton_text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a node's server process has of the model that its settings name."""

    settings: NodeSettings
    artifacts: Mapping[str, bytes]
    tokenizer: Tokenizer

    @classmethod
    def load(cls, settings: NodeSettings) -> Self:
        """Raises SetupError."""
        artifacts = load_artifacts(settings)
        return cls(settings, artifacts, load_tokenizer(artifacts))


def load_artifacts(settings: NodeSettings) -> dict[str, bytes]:
    """Return the model's tokenizer, config and template files, and a file that names its parsers,
    by file name. Raise SetupError if a file is missing or wrong, or a parser is unknown."""
    try:
        parsers = parsers_artifact(settings.tool_parser, settings.reasoning_parser)
        if settings.model:
            tokenizer = Path(settings.tokenizer) if settings.tokenizer else None
            template = settings.chat_template or None
            return read_artifacts(Path(settings.model), template, tokenizer) | parsers
        vocab = settings.sim.vocab_size
        return (byte_artifacts(vocab) if vocab else byte_artifacts()) | parsers
    except ArtifactError as error:
        raise SetupError(str(error)) from error


def load_tokenizer(artifacts: Mapping[str, bytes]) -> Tokenizer:
    """Return the artifacts' tokenizer. Raise SetupError if they hold no valid tokenizer."""
    try:
        return Tokenizer.from_artifacts(artifacts)
    except ArtifactError as error:
        raise SetupError(str(error)) from error

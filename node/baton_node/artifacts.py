"""The small files of a node's model: its server serves them, its engine process compiles grammars
for their tokenizer.

In: settings. Out: artifacts, their tokenizer. Raises SetupError for what a user can correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton_node.settings import NodeSettings, SetupError
from baton_text.artifacts import ArtifactError, byte_artifacts, read_artifacts
from baton_text.parsers.registry import parsers_artifact
from baton_text.tokenizer import Tokenizer


def load_artifacts(settings: NodeSettings) -> dict[str, bytes]:
    """Tokenizer, configuration and template of the model, and what the settings say of its
    parsers; raise SetupError."""
    try:
        parsers = parsers_artifact(settings.tool_parser, settings.reasoning_parser)
        if settings.model:
            return read_artifacts(Path(settings.model), settings.chat_template) | parsers
        vocab = settings.sim.vocab_size
        return (byte_artifacts(vocab) if vocab else byte_artifacts()) | parsers
    except ArtifactError as error:
        raise SetupError(str(error)) from error


def load_tokenizer(artifacts: Mapping[str, bytes]) -> Tokenizer:
    """Raise SetupError for files that are no tokenizer."""
    try:
        return Tokenizer.from_artifacts(artifacts)
    except ArtifactError as error:
        raise SetupError(str(error)) from error

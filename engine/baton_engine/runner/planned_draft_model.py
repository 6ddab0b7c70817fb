"""The draft model: which one, and whether it fits the target.

In: an engine's settings and the target's config. Out: settings and config of the draft model, or a
one-line error about its folder, its architecture or its tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import quantized_online, read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.speculative import FLAG, SpeculativeConfig
from baton_engine.errors import ModelError, SettingsError
from baton_engine.weights.checkpoint import weight_files
from baton_protocol.policies import DType
from baton_text.artifacts import ArtifactError, read_artifacts
from baton_text.tokenizer import Tokenizer

Ids = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PlannedDraftModel:
    """`settings` are the engine's, with the draft model's folder and quantization. Its KV has the
    target's dtype and block size, and never leaves the engine."""

    settings: TorchSettings
    config: ModelConfig


def plan_draft_model(
    settings: TorchSettings, target: ModelConfig, dtype: str
) -> PlannedDraftModel | None:
    """The model that drafts, computed in the target's dtype; None if no model does. Raises
    SettingsError."""
    if settings.speculative_config is None:
        return None
    speculative = SpeculativeConfig.parse(settings.speculative_config)
    if speculative.method != "draft_model":
        return None
    assert speculative.model is not None
    folder = Path(speculative.model)
    own = replace(
        settings,
        model=folder,
        quantization=speculative.quantization,
        speculative_config=None,
        dtype=cast(DType, dtype),
        model_impl="auto",
        store_codec="none",
        kv_shards=1,
        chunk_blocks=1,
    )
    try:
        config = read_config(folder, own.model_impl, runner="generate")
        config = quantized_online(config, own.quantization, drafts=True)
        if own.load_format != "dummy":
            weight_files(folder)
    except ModelError as error:
        raise SettingsError(f"{FLAG}: {error}") from error
    _check_tokens(settings.model, target, folder, config)
    return PlannedDraftModel(own, config.limited_to(settings.max_model_len))


def _check_tokens(target: Path, one: ModelConfig, draft: Path, other: ModelConfig) -> None:
    """Raise SettingsError unless both models have the same tokens. With equal tokenizers, the
    numbers of ids may differ: some models have ids that no token uses."""
    ids, other_ids = token_ids(target), token_ids(draft)
    if ids is None or other_ids is None:
        if one.vocab_size != other.vocab_size:
            raise SettingsError(
                f"{FLAG}: the draft model {draft} has {other.vocab_size} token ids, and {target}"
                f" has {one.vocab_size}; a draft model needs the same tokenizer"
            )
        return
    differing = sorted(
        set(ids.items()) ^ set(other_ids.items()), key=lambda pair: (pair[1], pair[0])
    )
    if differing:
        text = differing[0][0]
        raise SettingsError(
            f"{FLAG}: the draft model {draft} has another tokenizer than {target}: {text!r} has"
            f" {_id_in(other_ids, text)} there and {_id_in(ids, text)} here; of {len(ids)} tokens,"
            f" {len(set(ids.items()) - set(other_ids.items()))} differ"
        )


def _id_in(ids: Ids, text: str) -> str:
    return f"id {ids[text]}" if text in ids else "no id"


def token_ids(folder: Path) -> Ids | None:
    """The id of each token of a model's tokenizer; None without a tokenizer that can be read."""
    try:
        return Tokenizer.from_artifacts(read_artifacts(folder)).ids
    except ArtifactError:
        return None

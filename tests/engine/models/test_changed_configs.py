"""Each field of config.json removed and changed: it is read as transformers reads it, or refused in
one line that names the field.

The fields are those of the tiny checkpoints of each family in BUILT_IN, so a family that is added
is tested without a change here. A config that is served must mean what it means for transformers:
written again by transformers, with all defaults in it, it must be read as the same ModelConfig.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import BUILT_IN, config_of
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError, SettingsError
from baton_engine.memory.demand import MemoryBudget
from baton_engine.memory.fit_check import check_fit
from baton_engine.memory.requirements import demand_of, layout_of
from tests.support.engines.changed_fields import REMOVED, VALUES, Field, Json, changed, others
from tests.support.engines.tiny_models import (
    EXPERT_MODELS,
    MORE_MODELS,
    TINY_MODELS,
    make_tiny_model,
)

SETTINGS = TorchSettings(model=Path())
# The fields of a ModelConfig that transformers has under a name of its own.
NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}


def fields_of(config: Json) -> Iterator[tuple[Field, Any]]:
    for key, value in config.items():
        yield (key,), value
        if isinstance(value, dict):
            yield from (((key, inner), item) for inner, item in value.items())


@cache
def folders_of(architecture: str) -> tuple[Path, ...]:
    """The tiny checkpoints of a family."""
    folders = tuple(
        folder
        for folder in map(make_tiny_model, [*TINY_MODELS, *MORE_MODELS, *EXPERT_MODELS])
        if json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    )
    assert folders, f"{architecture} has no checkpoint in tests/support/engines/tiny_models.py"
    return folders


def cases_of(architecture: str, *, once: bool) -> Iterator[tuple[Json, Field, Any]]:
    """(config, field, its new value): each field of each checkpoint, unless another checkpoint of
    the family has the same. With `once` a field gets the values that do not depend on its own only
    in the first checkpoint that has it."""
    seen, wrong = set[tuple[Field, str]](), set[Field]()
    for folder in folders_of(architecture):
        config = json.loads((folder / "config.json").read_text())
        for field, value in fields_of(config):
            if (key := (field, json.dumps(value))) not in seen:
                seen.add(key)
                values = () if once and field in wrong else VALUES
                wrong.add(field)
                yield from ((config, field, new) for new in (*values, *others(value)))


def serve(config: Json) -> ModelConfig:
    """Reads a config.json, and checks the memory of an engine on a machine with 8 GiB."""
    read = config_of(config, {}, impl="baton")
    layout = layout_of(SETTINGS, read)
    demand = demand_of(SETTINGS, read, layout, kernels="torch", card=None)
    check_fit(demand, MemoryBudget(total=8 << 30))
    return replace(read, unread=())


def transformers_config(kind: str, config: Json) -> Any:
    """transformers' reading, which may change the object that it reads; None if it refuses."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[kind].from_dict(deepcopy(config))
    except Exception:
        return None


@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("architecture", BUILT_IN)
def test_a_changed_field_is_read_as_by_transformers_or_named_in_the_error(
    architecture: str, once: bool
) -> None:
    found = []
    for config, field, value in cases_of(architecture, once=once):
        wrong = complaint(config, field, value)
        if wrong:
            shown = "removed" if value is REMOVED else repr(value)[:40]
            found.append(f"{'.'.join(field)} {shown}: {wrong}")
    assert not found, f"{len(found)} cases:\n" + "\n".join(found)


@pytest.mark.parametrize("architecture", BUILT_IN)
def test_a_size_that_is_read_and_fits_no_machine_ends_in_the_error_about_memory(
    architecture: str,
) -> None:
    config = json.loads((folders_of(architecture)[0] / "config.json").read_text())
    with pytest.raises(SettingsError, match=r"does not fit: weights .* GiB"):
        serve({**config, "vocab_size": 2**31 - 1})


def complaint(config: Json, field: Field, value: Any) -> str | None:
    """What is wrong about how `config` is read with another `value` of the field."""
    other = changed(config, field, value)
    try:
        served = serve(other)
    except (ModelError, SettingsError) as error:
        text = str(error)
        clear = field[-1] in text or "does not fit" in text
        return None if clear and "\n" not in text and len(text) < 600 else text
    except Exception as error:
        return repr(error)
    theirs = transformers_config(config["model_type"], other)
    if theirs is None and type(value) is int and value < 10**300:
        # It refuses integers where it wants floats.
        theirs = transformers_config(config["model_type"], changed(config, field, float(value)))
    if theirs is None:
        return None if served == serve(config) else "served, and refused by transformers"
    # Its default is an id of some tokenizer.
    written = {**theirs.to_dict(), "eos_token_id": other.get("eos_token_id")}
    try:
        again = serve(written)
    except (ModelError, SettingsError) as error:
        return f"served, and as transformers writes it: {error}"
    if served != again:
        return f"served as {served}, and transformers reads {written}"
    for ours, key in NAMES.items():
        if hasattr(theirs, key) and getattr(served, ours) != getattr(theirs, key):
            return f"{ours} is {getattr(served, ours)}, and {key} {getattr(theirs, key)}"
    return None


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", [0, 7, [], [7], [3, 0, 7]])
def test_eos_ids_are_read_from_both_files(value: Any, file: str) -> None:
    assert eos_ids_of(file, value) == tuple(value if isinstance(value, list) else [value])


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "value", [True, -1, 10**12, 2.0, math.nan, "2", ["2"], [None], [[2]], [2.5], [-1], {"id": 2}]
)
def test_what_is_no_eos_id_is_named_in_the_error(value: Any, file: str) -> None:
    with pytest.raises(ModelError, match=rf"^{file}: eos_token_id is .*; expected a token id"):
        eos_ids_of(file, value)


def eos_ids_of(file: str, value: Any) -> tuple[int, ...]:
    config = json.loads((folders_of("LlamaForCausalLM")[0] / "config.json").read_text())
    if file == "config.json":
        return config_of({**config, "eos_token_id": value}, {}, impl="baton").eos_ids
    return config_of(config, {"eos_token_id": value}, impl="baton").eos_ids

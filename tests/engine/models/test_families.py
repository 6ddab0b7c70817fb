"""The registry of model families, and families of other packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton_engine.config.engine_config import ModelImpl
from baton_engine.config.entry_points import installed_points
from baton_engine.config.families import (
    BUILT_IN,
    GROUP,
    Family,
    find_family,
    read_config,
)
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError, UnsupportedModel
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder
from baton_engine.models.registry import build_model

CONFIG = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
MODULE = """
from baton_engine.config.dense import Dense
from baton_engine.config.families import Family

FAMILY = Family(
    read=Dense(qkv_bias=True).read, model="{name}.model:Model", examples="New", windows="refused"
)
NOT_A_FAMILY = 7
"""
MODEL = """
from baton_engine.models.decoder import Decoder


class Model(Decoder):
    pass
"""


class Packages:
    """Installs distributions with one family each in a folder on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.modules: list[str] = []

    def install(
        self, name: str, architecture: str, *, value: str = "", module: str = MODULE
    ) -> None:
        """`value` is the entry point's; by default it names the FAMILY of the package."""
        package = self._folder / name
        package.mkdir()
        (package / "__init__.py").write_text(module.format(name=name))
        (package / "model.py").write_text(MODEL)
        self.modules += [name, f"{name}.model"]
        facts = self._folder / f"{name}-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        line = f"{architecture} = {value or f'{name}:FAMILY'}"
        (facts / "entry_points.txt").write_text(f"[{GROUP}]\n{line}\n")
        installed_points.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    installed = Packages(folder)
    yield installed
    installed_points.cache_clear()
    for module in installed.modules:
        sys.modules.pop(module, None)


def read(folder: Path, architecture: str, impl: ModelImpl = "auto") -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture]}))
    return read_config(folder, impl)


@pytest.mark.parametrize("architecture", BUILT_IN)
def test_each_family_has_a_parser_and_a_model_class(architecture: str) -> None:
    family = find_family(architecture)
    assert isinstance(family, Family)
    assert issubclass(family.model_class(), Decoder)


def test_the_error_for_an_unknown_architecture_lists_all_families(
    tmp_path: Path, packages: Packages
) -> None:
    packages.install("new_family", "NewForCausalLM")
    with pytest.raises(UnsupportedModel) as error:
        read(tmp_path, "GPT2LMHeadModel", "baton")
    supported = sorted([*BUILT_IN, "NewForCausalLM"])
    assert f"supported: {', '.join(supported)}" in str(error.value)


def test_the_first_supported_architecture_of_a_config_is_used(tmp_path: Path) -> None:
    values = {**CONFIG, "architectures": ["OtherForCausalLM", "Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path).architecture == "Qwen2ForCausalLM"


def test_a_family_of_another_package_is_read_and_built(tmp_path: Path, packages: Packages) -> None:
    packages.install("new_family", "NewForCausalLM")
    config = read(tmp_path, "NewForCausalLM")
    assert (config.architecture, config.qkv_bias) == ("NewForCausalLM", True)
    assert "new_family.model" not in sys.modules  # imports torch, which a parser does not need
    model = build_model(config, WeightSlots(torch.float32, torch.device("meta")))
    assert type(model).__module__ == "new_family.model"


def test_two_packages_with_the_same_architecture_are_an_error(
    tmp_path: Path, packages: Packages
) -> None:
    packages.install("one_family", "NewForCausalLM")
    packages.install("two_family", "NewForCausalLM")
    with pytest.raises(ModelError, match=r"NewForCausalLM is provided by .*one_family, two_family"):
        read(tmp_path, "NewForCausalLM")


def test_a_package_cannot_replace_a_family_of_the_engine(
    tmp_path: Path, packages: Packages
) -> None:
    packages.install("new_family", "LlamaForCausalLM")
    with pytest.raises(ModelError, match="several packages: baton-serve, new_family"):
        read(tmp_path, "LlamaForCausalLM")
    assert read(tmp_path, "Qwen2ForCausalLM").qkv_bias  # other architectures still work


@pytest.mark.parametrize(
    ("value", "module", "message"),
    [
        ("", "import a_missing_module", "cannot be imported: .*a_missing_module"),
        ("new_family:OTHER", MODULE, "cannot be imported: .*OTHER"),
        ("new_family:NOT_A_FAMILY", MODULE, "is of type int; expected a Family"),
    ],
)
def test_an_entry_point_without_a_family_is_an_error(
    tmp_path: Path, packages: Packages, value: str, module: str, message: str
) -> None:
    packages.install("new_family", "NewForCausalLM", value=value, module=module)
    with pytest.raises(ModelError, match=f"of new_family, .*NewForCausalLM, {message}"):
        read(tmp_path, "NewForCausalLM")
    assert read(tmp_path, "LlamaForCausalLM").num_heads == 4


def test_a_model_class_that_cannot_be_imported_is_an_error(
    tmp_path: Path, packages: Packages
) -> None:
    module = MODULE.replace(".model:Model", ".missing:Model")
    packages.install("new_family", "NewForCausalLM", module=module)
    config = read(tmp_path, "NewForCausalLM")
    with pytest.raises(ModelError, match=r"new_family\.missing:Model.*cannot be imported"):
        build_model(config, WeightSlots(torch.float32, torch.device("meta")))

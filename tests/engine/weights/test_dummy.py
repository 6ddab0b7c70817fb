"""Dummy weights: random, reproducible, in the model's shapes, with a fingerprint of their own."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.errors import SettingsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.estimate import count_weights
from baton_engine.models.registry import build_model
from baton_engine.weights.dummy import fill_slots
from baton_engine.weights.safetensors_files import SINGLE_NAME
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.tiny_models import EXPERT_MODELS, MORE_MODELS, TINY_MODELS, prompt_of
from tests.support.engines.torch_engines import generate_ids
from tests.support.needs import needs

SHAPES = Path(__file__).resolve().parents[3] / "benchmarks" / "shapes"


def slots_of(folder: Path) -> WeightSlots:
    slots = WeightSlots(torch.float32, torch.device("cpu"))
    build_model(read_config(folder), slots)
    return slots


def copy_config(folder: Path, into: Path) -> Path:
    """Make a folder with only the model's config."""
    into.mkdir()
    shutil.copy(folder / "config.json", into)
    return into


@pytest.mark.parametrize("name", [*TINY_MODELS, *MORE_MODELS, *EXPERT_MODELS])
def test_count_weights_equals_the_number_of_weights_of_the_model(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(name)
    allocated = sum(math.prod(one.shape) for one in slots_of(folder).parameters.values())
    assert count_weights(read_config(folder)) == allocated


@pytest.mark.parametrize(
    ("name", "weights"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)]
)
def test_the_benchmark_shapes_have_the_published_numbers_of_weights(
    name: str, weights: int
) -> None:
    assert count_weights(read_config(SHAPES / name)) == weights


def test_dummy_norms_are_one_biases_zero_and_other_weights_normal(
    tiny_model: Callable[[str], Path],
) -> None:
    slots = slots_of(tiny_model("qwen3-bias-linear-rope"))
    fill_slots(slots)
    for name, parameter in slots.parameters.items():
        place = parameter.place
        if name.endswith("norm.weight"):
            assert (place == 1).all(), name
        elif name.endswith("bias"):
            assert (place == 0).all(), name
        else:
            assert 0.015 < place.std() < 0.025, name
            assert place.mean().abs() < 0.005, name


@pytest.mark.parametrize("name", ["qwen3-gqa2", "phi3-long-rope", "gemma2"])
def test_dummy_weights_and_fingerprint_do_not_depend_on_the_folder(
    name: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    source = tiny_model(name)
    results = []
    for copy in "ab":
        folder = copy_config(source, tmp_path / copy)
        settings = TorchSettings(model=folder, load_format="dummy", threads=1, kv_blocks=20)
        engine = build_torch(settings)
        results.append((engine.info.fingerprint, generate_ids(engine, [prompt_of(20)])))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["qwen3-gqa4", "phi3-partial-window", "gemma2"])
def test_ids_with_dummy_weights_equal_those_of_transformers_with_the_same_weights(
    name: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = copy_config(tiny_model(name), tmp_path / "model")
    settings = TorchSettings(
        model=folder, load_format="dummy", dtype="float32", threads=1, kv_blocks=40
    )
    prompt = prompt_of(100, seed=2)
    [ids] = generate_ids(build_torch(settings), [prompt])
    slots = slots_of(folder)
    fill_slots(slots)
    parameters = slots.parameters.items()
    tensors = {name: (each.place - each.offset).contiguous() for name, each in parameters}
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})
    compare(reference(folder, prompt, 64, ids), ids, Tally())


def test_an_unknown_load_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--load-format pickle is unknown; use auto, dummy"):
        TorchSettings(model=tmp_path, load_format="pickle").check()  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpus_kv_pool_leaves_room_for_dummy_weights() -> None:
    needs("gpu")
    settings = TorchSettings(model=SHAPES / "qwen3-0.6b", load_format="dummy", device="cuda")
    engine = build_torch(settings)
    assert engine.info.num_blocks * engine.info.layout.block_bytes > 1 << 30
    assert len(generate_ids(engine, [prompt_of(20)])[0]) > 0


def test_dummy_weights_have_another_fingerprint_than_the_checkpoint(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("qwen3-gqa2")
    real, dummy = (
        build_torch(TorchSettings(model=folder, load_format=load_format, threads=1, kv_blocks=20))
        for load_format in ("auto", "dummy")
    )
    assert real.info.layout == dummy.info.layout
    assert real.info.fingerprint != dummy.info.fingerprint

"""Torch engines that sleep, wake up and take other weights: the same answers as an engine that was
just built, and memory that really falls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine import LLM, SamplingParams
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import EngineError, SettingsError, WeightsError
from baton_engine.interface import SleepLevel
from baton_engine.runner.moved_tensors import MovedTensors, tensors_of
from tests.support.engines.heads import make_head
from tests.support.engines.tiny_models import prompt_of, with_other_weights
from tests.support.engines.torch_engines import generate_ids, small_engine

MODEL = "llama-gqa2-tied"
PROMPTS = [prompt_of(40, seed=1), prompt_of(70, seed=2)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
NORM = "model.layers.0.input_layernorm.weight"
MIB = 1 << 20


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(MODEL)


def answers(engine: EngineCore) -> list[list[int]]:
    return generate_ids(engine, PROMPTS, PARAMS)


def drafting(method: str, folder: Path, place: Path) -> str:
    second = folder if method == "draft_model" else make_head(method, folder, place / method)
    return json.dumps({"method": method, "model": str(second), "num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (MODEL, {"host_kv_memory": MIB, "kv_blocks": 12}),
        pytest.param(MODEL, {"dtype": "bfloat16", "overlap": "on"}, marks=pytest.mark.long),
        pytest.param(MODEL, {"speculative_config": NGRAM}, marks=pytest.mark.long),
        pytest.param(MODEL, {"speculative_config": "draft_model"}, marks=pytest.mark.long),
        pytest.param(MODEL, {"speculative_config": "eagle"}, marks=pytest.mark.long),
        pytest.param(MODEL, {"speculative_config": "medusa"}, marks=pytest.mark.long),
        pytest.param(
            MODEL, {"kv_cache_dtype": "int8", "batch_invariant": "off"}, marks=pytest.mark.long
        ),
        pytest.param("deepseek-v3", {}, marks=pytest.mark.long),
        pytest.param("mistral-window", {}, marks=pytest.mark.long),
        pytest.param(f"{MODEL} in w4a16 g32", {}, marks=pytest.mark.long),
    ],
)
def test_the_answers_are_the_same_after_each_level(
    tiny_model: Callable[[str], Path], tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    folder = tiny_model(name)
    asked = settings.get("speculative_config", "")
    if asked and asked != NGRAM:
        settings = settings | {"speculative_config": drafting(asked, folder, tmp_path)}
    engine = small_engine(folder, **settings)
    info, before = engine.info, answers(engine)
    levels: tuple[SleepLevel, ...] = (2, 1)
    for level in levels:
        engine.sleep(level)
        engine.check_integrity()
        engine.wake_up(["weights"])
        engine.wake_up(["kv_cache"])
        assert engine.info == info
        assert answers(engine) == before
    engine.check_integrity()


def test_other_weights_have_another_name_and_the_answers_of_an_engine_built_with_them(
    folder: Path, tmp_path: Path
) -> None:
    engine = small_engine(folder)
    first, names = answers(engine), {engine.info.fingerprint}
    other = with_other_weights(folder)
    engine.update_weights(other)
    assert engine.info.fingerprint not in names
    assert not engine.cached_chunks()
    built = small_engine(other)
    assert answers(engine) == answers(built) != first
    assert engine.info.fingerprint == built.info.fingerprint
    names.add(engine.info.fingerprint)

    norm = 2 * load_file(other / "model.safetensors")[NORM]
    engine.update_weights(tensors={NORM: norm})
    changed = tmp_path / "changed"
    shutil.copytree(other, changed, ignore=shutil.ignore_patterns(".*"))
    tensors = load_file(other / "model.safetensors") | {NORM: norm}
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    built = small_engine(changed)
    assert engine.info.fingerprint == built.info.fingerprint
    assert engine.info.fingerprint not in names
    assert answers(engine) == answers(built)

    engine.sleep(2)  # the tensors are not lost with the weights
    engine.wake_up()
    assert answers(engine) == answers(built)
    engine.update_weights(folder)
    assert engine.info.fingerprint in names
    assert answers(engine) == first


def other_sizes(folder: Path, place: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    return place


def without_a_tensor(folder: Path, place: Path) -> Path:
    lacking = place / "lacking"
    shutil.copytree(folder, lacking, ignore=shutil.ignore_patterns(".*"))
    tensors = load_file(folder / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    return lacking


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (other_sizes, SettingsError, "no version of the model that runs"),
        (without_a_tensor, WeightsError, f"lacks {NORM}"),
        ({"norm": torch.ones(1)}, WeightsError, "has no tensor norm"),
        ({NORM: torch.ones(3)}, WeightsError, r"has shape \[3\]"),
    ],
)
def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    folder: Path,
    tmp_path: Path,
    weights: Callable[[Path, Path], Path] | dict[str, torch.Tensor],
    error: type[EngineError],
    message: str,
) -> None:
    engine = small_engine(folder)
    info, before = engine.info, answers(engine)
    tensors = weights if isinstance(weights, dict) else None
    path = None if isinstance(weights, dict) else weights(folder, tmp_path)
    with pytest.raises(error, match=message):
        engine.update_weights(path, tensors)
    assert (engine.info, engine.away) == (info, ())
    assert answers(engine) == before


@pytest.mark.long
def test_weights_that_changed_on_disk_during_the_sleep_have_another_name(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*"))
    engine = small_engine(copy)
    before = engine.info.fingerprint
    engine.sleep(2)
    other = with_other_weights(folder)
    shutil.copy(other / "model.safetensors", copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "away")
    with pytest.raises(EngineError):
        engine.wake_up()
    assert engine.away == ("weights", "kv_cache")
    (copy / "away").rename(copy / "model.safetensors")
    engine.wake_up()
    assert engine.info.fingerprint != before
    assert answers(engine) == answers(small_engine(other))


def test_the_offline_api_sleeps_wakes_up_and_updates_weights(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", threads=1, kv_blocks=50)
    [before] = llm.generate(PROMPTS[0], PARAMS)
    llm.sleep(level=2)
    with pytest.raises(EngineError, match="wake it up"):
        llm.generate(PROMPTS[0], PARAMS)
    llm.wake_up()
    [after] = llm.generate(PROMPTS[0], PARAMS)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.update_weights(str(with_other_weights(folder)))
    [other] = llm.generate(PROMPTS[0], PARAMS)
    assert other.outputs[0].token_ids != before.outputs[0].token_ids


def test_all_tensors_of_an_object_move_to_host_memory_and_back() -> None:
    """As weights do on a GPU at level 1: in attributes, collections, closures and views."""
    whole, scale, bias = torch.rand(8, 4), torch.rand(4), torch.rand(3)

    class Layer:
        __slots__ = ("act", "parts")

        def __init__(self) -> None:
            def act(x: torch.Tensor) -> torch.Tensor:
                return x @ whole.T * scale.sum()

            self.parts = {"rows": [whole[2:5], whole[5:]], "bias": (bias,)}
            self.act = act

    layer, x = Layer(), torch.rand(2, 4)
    before = layer.act(x), layer.parts["rows"][1].clone()
    size = sum(each.nbytes for each in (whole, scale, bias))
    assert {id(each) for each in tensors_of(layer)} >= {id(whole), id(scale), id(bias)}
    moved = MovedTensors.of(layer)
    assert moved.nbytes == size
    assert not any(each.untyped_storage().nbytes() for each in (whole, scale, bias))
    moved.move_back()
    assert torch.equal(layer.act(x), before[0])
    assert torch.equal(layer.parts["rows"][1], before[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_a_gpu_has_its_memory_back_while_the_engine_sleeps(folder: Path) -> None:
    engine = small_engine(folder, device="cuda", kv_blocks=20_000)
    before, awake = answers(engine), torch.cuda.memory_allocated()
    pool = 20_000 * engine.info.layout.block_bytes
    levels: tuple[SleepLevel, ...] = (1, 2)
    for level in levels:
        engine.sleep(level)
        assert awake - torch.cuda.memory_allocated() > pool
        engine.wake_up()
        assert answers(engine) == before


MEMORY = """
import json, re, sys
from pathlib import Path
from baton_engine import SamplingParams
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
prompts = [prompt_of(200, seed=1), prompt_of(60, seed=2)]
engine = small_engine(
    Path(sys.argv[1]), load_format="dummy", dtype=sys.argv[2], kv_blocks=None, overcommit=True,
    kv_memory=int(sys.argv[3]),
)
first = generate_ids(engine, prompts, params)
figures = []
for cycle in range(int(sys.argv[4])):
    awake = resident()
    engine.sleep(1)
    one = resident()
    engine.sleep(2)
    two = resident()
    engine.wake_up()
    assert generate_ids(engine, prompts, params) == first
    figures.append((awake, one, two))
print(json.dumps(figures))
"""


def asleep(folder: Path, dtype: str, kv_memory: int, cycles: int) -> list[tuple[int, int, int]]:
    """Resident bytes of a process awake, at level 1, and at level 2, in each cycle."""
    command = [sys.executable, "-c", MEMORY, str(folder), dtype, str(kv_memory), str(cycles)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: list[tuple[int, int, int]] = json.loads(done.stdout)
    return figures


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_falls_by_the_pool_and_by_the_weights(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = 512 * (512 + 2 * 256 + 512 + 3 * 2048)
    weights, pool = 8 * layer * (4 if dtype == "float32" else 2), 256 * MIB
    for awake, one, two in asleep(tmp_path, dtype, pool, 3):
        assert awake - one > 0.98 * pool
        assert one - two > 0.9 * weights


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_level_after_fifty_cycles(folder: Path) -> None:
    figures = asleep(folder, "float32", 32 * MIB, 50)
    for state in range(3):
        course = [each[state] for each in figures[10:]]
        assert max(course[-10:]) < max(course[:10]) + 8 * MIB, course

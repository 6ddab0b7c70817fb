"""`baton bench`: figures on stdout and in JSON, for either engine; errors of one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from baton_cli.bench.engine import build, find_folder
from baton_cli.bench.options import LatencyOptions, ThroughputOptions
from baton_cli.bench.workload import random_prompts
from baton_cli.commands.bench import check_room
from baton_cli.errors import CommandError
from baton_cli.options.records import CommonOptions, EngineOptions
from baton_engine.config.engine_config import Overlap
from tests.support.project.command import baton, baton_process, figures

SIM = ("--engine", "sim", "--kv-blocks", "1000")
WIDE = ("--engine", "sim", "--sim-vocab-size", "10001")  # has the preset's ids


def test_throughput_of_the_simulated_engine(tmp_path: Path) -> None:
    words = ("--num-prompts", "6", "--input-len", "64", "--output-len", "20", "--seed", "3")
    found = figures(tmp_path / "f", "throughput", *SIM, *words, "--random-prefix-len", "32")
    assert (found["num_requests"], found["total_num_tokens"]) == (6, 6 * (64 + 32 + 20))
    assert (found["prompt_tokens"], found["output_tokens"]) == (6 * 96, 6 * 20)
    assert found["cached_prompt_tokens"] > 0
    assert found["elapsed_time"] * found["tokens_per_second"] == pytest.approx(6 * 116)
    assert found["steps"] >= found["sampling_steps"] >= 20
    assert found["setting"] | {"engine": "sim", "seed": 3, "kv_blocks": 1000} == found["setting"]


def test_the_preset_in_part_wastes_little_kv(tmp_path: Path) -> None:
    words = ("--preset", "nano-vllm", "--num-prompts", "4")
    found = figures(tmp_path / "f", "throughput", *WIDE, *words)
    assert found["setting"]["workload"] == "nano-vllm"
    assert 0.0 < found["kv_waste"]["steady"] < 0.04
    assert 0.0 < found["kv_waste"]["run"] < 0.04


@pytest.mark.long
def test_the_whole_preset_takes_as_many_steps_as_its_longest_answer(tmp_path: Path) -> None:
    words = ("--preset", "nano-vllm", "--max-batched-tokens", "150000", "--kv-blocks", "20000")
    found = figures(tmp_path / "f", "throughput", *WIDE, *words, "--sim-layers", "1")
    assert (found["prompt_tokens"], found["output_tokens"]) == (142_827, 133_966)
    assert (found["steps"], found["preemptions"]) == (1_024, 0)
    assert found["kv_waste"]["run"] < 0.04


@pytest.mark.integration
def test_a_run_of_its_own_process_is_silent_on_stderr() -> None:
    done = baton_process("bench", "throughput", *SIM, "--num-prompts", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout != ""


def test_conversations_of_a_file(tmp_path: Path) -> None:
    turns = [{"value": "what is a block?"}, {"value": "16 tokens"}]
    (tmp_path / "texts").write_text(json.dumps([{"conversations": turns}]))
    words = ("--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "texts"))
    found = figures(tmp_path / "f", "throughput", *SIM, *words)
    assert (found["num_requests"], found["output_tokens"]) == (1, len("16 tokens"))


def test_latency_of_the_simulated_engine(tmp_path: Path) -> None:
    words = ("--batch-size", "3", "--num-iters-warmup", "1", "--num-iters", "2")
    found = figures(tmp_path / "f", "latency", *SIM, *words, "--sim-decode-ms", "1")
    assert (found["setting"]["overlap"], found["setting"]["enforce_eager"]) == (False, False)
    assert found["batch_size"] == 3
    assert len(found["latencies"]) == 2
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 2)
    # 127 steps that generate, of 1 ms each at least.
    assert min(found["latencies"]) >= 0.127


def test_a_shape_is_timed_from_its_config_alone(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = tmp_path / "shape"
    folder.mkdir()
    shutil.copy(tiny_model("qwen3-gqa2") / "config.json", folder)
    model = ("--model", str(folder), "--load-format", "dummy", "--threads", "1")
    words = ("--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--kv-blocks", "50")
    found = figures(tmp_path / "f", "throughput", *model, *words)
    assert (found["output_tokens"], found["setting"]["load_format"]) == (12, "dummy")
    assert found["setting"]["engine"] == "torch"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["throughput"], "baton: --model is missing: give a Hugging Face folder"),
        (["throughput", "--model", "/no/such"], "baton: --model /no/such: there is no such folder"),
        (
            ["latency", "--load-format", "dummy", "--model", "/no/such"],
            "baton: --model /no/such: --load-format dummy needs a folder that holds config.json",
        ),
        (
            ["latency", "--engine", "sim", "--load-format", "dummy"],
            "baton: --load-format dummy is for --engine torch",
        ),
        (
            ["throughput", "--engine", "sim", "--preset", "nano-vllm"],
            "baton: --preset nano-vllm draws ids up to 10000; this model has 259",
        ),
        (
            ["latency", "--engine", "sim", "--kv-blocks", "2"],
            "baton: a request of random has 160 tokens, prompt and answer; this engine takes 32",
        ),
        (
            ["latency", "--engine", "sim", "--output-json", "/no/such/f"],
            "baton: --output-json /no/such/f: there is no such folder",
        ),
        (["latency", "--engine", "sim", "--kv-shards", "7"], "baton: sim kv_shards is 7"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], line: str) -> None:
    done = baton("bench", *words)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(line)


def test_a_request_may_fill_the_engine_to_its_last_token() -> None:
    engine = build(LatencyOptions(engine="sim", kv_blocks=2), None)
    check_room(engine, random_prompts(99, count=1, input_len=20, output_len=12, seed=0))
    with pytest.raises(
        CommandError, match="has 33 tokens, prompt and answer; this engine takes 32"
    ):
        check_room(engine, random_prompts(99, count=1, input_len=20, output_len=13, seed=0))


def test_flags_of_the_engine_reach_it() -> None:
    options = ThroughputOptions(
        engine="sim", kv_blocks=40, block_size=8, max_batched_tokens=70, max_num_seqs=9
    )
    assert find_folder(options) is None
    info = build(options, None).info
    assert (info.num_blocks, info.layout.block_size) == (40, 8)
    assert (info.max_batched_tokens, info.max_num_seqs) == (70, 9)


def test_both_engines_are_told_every_flag_that_has_a_setting() -> None:
    asked = {field.name for field in fields(EngineOptions)} - {
        field.name for field in fields(CommonOptions)
    }
    of_servers = {"model", "served_model_name", "engine", "chat_template", "sim"}
    of_servers |= {"tool_parser", "reasoning_parser"}
    assert asked - of_servers == EngineOptions().engine_options().keys()


@pytest.mark.parametrize(("asked", "overlaps"), [("auto", False), ("on", True), ("off", False)])
def test_the_simulated_engine_overlaps_steps_where_it_is_told_to(
    asked: Overlap, overlaps: bool
) -> None:
    options = LatencyOptions(engine="sim", kv_blocks=20, overlap=asked)
    assert build(options, None).overlap is overlaps

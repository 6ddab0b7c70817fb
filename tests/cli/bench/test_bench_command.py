"""`baton bench`: figures on stdout and in JSON for both engines, and one-line errors."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_cli.bench.engine import build, find_folder
from baton_cli.bench.options import LatencyOptions, ThroughputOptions
from baton_cli.bench.workload import random_prompts
from baton_cli.commands.bench import check_room
from baton_cli.errors import CommandError
from baton_engine.config.engine_config import Overlap
from baton_engine.runner import machine_speeds
from tests.support.project.command import baton, baton_process, figures

SIM = ("--engine", "sim", "--kv-blocks", "1000")
WIDE = ("--engine", "sim", "--sim-vocab-size", "10001")  # the preset's ids fit into it


def test_throughput_reports_exact_token_counts_on_the_simulated_engine(tmp_path: Path) -> None:
    flags = ("--num-prompts", "6", "--input-len", "64", "--output-len", "20", "--seed", "3")
    report = figures(tmp_path / "f", "throughput", *SIM, *flags, "--random-prefix-len", "32")
    assert (report["num_requests"], report["total_num_tokens"]) == (6, 6 * (64 + 32 + 20))
    assert (report["prompt_tokens"], report["output_tokens"]) == (6 * 96, 6 * 20)
    assert report["cached_prompt_tokens"] > 0
    assert report["elapsed_time"] * report["tokens_per_second"] == pytest.approx(6 * 116)
    assert report["steps"] >= report["sampling_steps"] >= 20
    assert report["setting"] | {"engine": "sim", "seed": 3, "kv_blocks": 1000} == report["setting"]


def test_throughput_reports_how_many_drafts_were_right(tmp_path: Path) -> None:
    config = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 1}'
    flags = ("--speculative-config", config, "--num-prompts", "2")
    report = figures(tmp_path / "f", "throughput", *SIM, *flags)
    share = report["accepted_drafts"] / report["drafted_tokens"]
    assert report["drafted_tokens"] > 0
    assert report["tokens_per_drafted_row"] == 1 + share  # with one draft in each row
    plain = figures(tmp_path / "f", "throughput", *SIM, "--num-prompts", "2")
    assert plain["tokens_per_drafted_row"] is None


def test_a_part_of_the_preset_wastes_less_than_four_percent_of_the_kv_cache(tmp_path: Path) -> None:
    flags = ("--preset", "nano-vllm", "--num-prompts", "4")
    report = figures(tmp_path / "f", "throughput", *WIDE, *flags)
    assert report["setting"]["workload"] == "nano-vllm"
    assert 0.0 < report["kv_waste"]["steady"] < 0.04
    assert 0.0 < report["kv_waste"]["run"] < 0.04


def test_a_chart_shows_the_kv_cache_over_time(tmp_path: Path) -> None:
    plot = tmp_path / "kv.svg"
    flags = ("--num-prompts", "3", "--input-len", "20", "--output-len", "40")
    figures(tmp_path / "f", "throughput", *SIM, *flags, "--kv-plot", str(plot))
    root = ElementTree.parse(plot).getroot()
    held, filled = (line for line in root.iter() if line.tag.endswith("polyline"))
    heights = [
        [float(corner.split(",")[1]) for corner in line.attrib["points"].split()]
        for line in (held, filled)
    ]
    assert len(heights[0]) == len(heights[1]) == 4  # one sample per 13 of 40 steps
    assert all(below >= above for above, below in zip(*heights, strict=True))


@pytest.mark.long
def test_the_whole_preset_takes_as_many_steps_as_its_longest_answer(tmp_path: Path) -> None:
    flags = ("--preset", "nano-vllm", "--max-batched-tokens", "150000", "--kv-blocks", "20000")
    report = figures(tmp_path / "f", "throughput", *WIDE, *flags, "--sim-layers", "1")
    assert (report["prompt_tokens"], report["output_tokens"]) == (142_827, 133_966)
    assert (report["steps"], report["preemptions"]) == (1_024, 0)
    assert report["kv_waste"]["run"] < 0.04


@pytest.mark.integration
def test_a_run_in_its_own_process_prints_nothing_on_stderr() -> None:
    done = baton_process("bench", "throughput", *SIM, "--num-prompts", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout != ""


def test_prompts_and_answer_lengths_come_from_a_sharegpt_file(tmp_path: Path) -> None:
    turns = [{"value": "what is a block?"}, {"value": "16 tokens"}]
    (tmp_path / "texts").write_text(json.dumps([{"conversations": turns}]))
    flags = ("--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "texts"))
    report = figures(tmp_path / "f", "throughput", *SIM, *flags)
    assert (report["num_requests"], report["output_tokens"]) == (1, len("16 tokens"))


def test_latency_reports_each_batch_on_the_simulated_engine(tmp_path: Path) -> None:
    flags = ("--batch-size", "3", "--num-iters-warmup", "1", "--num-iters", "2")
    report = figures(tmp_path / "f", "latency", *SIM, *flags, "--sim-decode-ms", "1")
    assert (report["setting"]["overlap"], report["setting"]["enforce_eager"]) == (False, False)
    assert report["batch_size"] == 3
    assert len(report["latencies"]) == 2
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 2)
    # 127 decode steps of at least 1 ms each.
    assert min(report["latencies"]) >= 0.127


def test_dummy_weights_need_only_the_config(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speeds, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine_speeds, "SIDE", {"cpu": 64})
    folder = tmp_path / "shape"
    folder.mkdir()
    shutil.copy(tiny_model("qwen3-gqa2") / "config.json", folder)
    model = ("--model", str(folder), "--load-format", "dummy", "--threads", "1")
    flags = ("--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--kv-blocks", "50")
    report = figures(tmp_path / "f", "throughput", *model, *flags)
    assert (report["output_tokens"], report["setting"]["load_format"]) == (12, "dummy")
    assert report["setting"]["engine"] == "torch"
    floor = report["floor"]
    assert (floor["steps"], floor["rows"]) == (3, 3.0)
    assert floor["share"] == pytest.approx(floor["floor_ms"] / floor["step_ms"])
    assert 0 < floor["kv_bytes"] < floor["weight_bytes"]
    assert report["static"]["useful_share"] == 1.0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["throughput"], "baton: --model is missing: give a Hugging Face folder"),
        (
            ["throughput", "--model", "/no/such"],
            "baton: --model /no/such: the folder does not exist",
        ),
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
            "baton: a request of random has 160 tokens, prompt and answer together, but this engine"
            " takes at most 32",
        ),
        (
            ["latency", "--engine", "sim", "--output-json", "/no/such/f"],
            "baton: --output-json /no/such/f: the folder does not exist",
        ),
        (["latency", "--engine", "sim", "--kv-shards", "7"], "baton: sim kv_shards is 7"),
        (
            ["throughput", "--engine", "sim", "--kv-plot", "/no/such/f"],
            "baton: --kv-plot /no/such/f: the folder does not exist",
        ),
    ],
)
def test_a_usage_error_is_one_line_on_stderr(flags: list[str], line: str) -> None:
    done = baton("bench", *flags)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(line)


def test_a_request_may_fill_the_engine_to_its_last_token() -> None:
    engine = build(LatencyOptions(engine="sim", kv_blocks=2), None)
    check_room(engine, random_prompts(99, count=1, input_len=20, output_len=12, seed=0))
    with pytest.raises(
        CommandError,
        match="has 33 tokens, prompt and answer together, but this engine takes at most 32",
    ):
        check_room(engine, random_prompts(99, count=1, input_len=20, output_len=13, seed=0))


def test_engine_flags_reach_the_engine() -> None:
    options = ThroughputOptions(
        engine="sim", kv_blocks=40, block_size=8, max_batched_tokens=70, max_num_seqs=9
    )
    assert find_folder(options) is None
    info = build(options, None).info
    assert (info.num_blocks, info.layout.block_size) == (40, 8)
    assert (info.max_batched_tokens, info.max_num_seqs) == (70, 9)


@pytest.mark.parametrize(("flag", "overlaps"), [("auto", False), ("on", True), ("off", False)])
def test_the_simulated_engine_overlaps_steps_only_with_overlap_on(
    flag: Overlap, overlaps: bool
) -> None:
    options = LatencyOptions(engine="sim", kv_blocks=20, overlap=flag)
    assert build(options, None).overlap is overlaps

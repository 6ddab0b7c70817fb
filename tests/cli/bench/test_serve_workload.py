"""What `baton bench serve` sends and when: arrival times, traces, bodies, flag combinations."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton_cli.bench.arrivals import arrivals, parse_rate
from baton_cli.bench.engine import read_tokenizer
from baton_cli.bench.serve_options import ServeOptions
from baton_cli.bench.serve_workload import Planned, Speaker, check_prompts, plan
from baton_cli.bench.trace import BLOCK_TOKENS, trace
from baton_cli.bench.workload import WorkloadItem
from baton_cli.errors import CommandError, UsageError


def gaps(rate: float, burstiness: float, count: int = 20_001) -> list[float]:
    return [after - before for before, after in pairwise(arrivals(count, rate, burstiness, 7))]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrival_gaps_have_the_mean_and_spread_of_their_gamma_distribution(
    burstiness: float,
) -> None:
    sample = gaps(5.0, burstiness)
    assert statistics.fmean(sample) == pytest.approx(0.2, rel=0.05)
    # A gamma distribution's deviation over its mean is 1 / sqrt(shape).
    spread = statistics.stdev(sample) / statistics.fmean(sample)
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_an_infinite_rate_sends_all_at_once_and_a_seed_makes_arrivals_reproducible() -> None:
    assert arrivals(3, parse_rate("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrivals(9, 2.0, 1.0, 3) == arrivals(9, 2.0, 1.0, 3) != arrivals(9, 2.0, 1.0, 4)
    assert arrivals(9, 2.0, 1.0, 3)[0] == 0.0


@pytest.mark.parametrize("text", ["0", "-1", "nan", "fast"])
def test_an_invalid_request_rate_is_named_in_the_error(text: str) -> None:
    with pytest.raises(UsageError, match=f"--request-rate {text}: give requests a second"):
        parse_rate(text)


def write_trace(path: Path, *lines: tuple[float, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, line, strict=True))) for line in lines))
    return path


def read(path: Path, **more: Any) -> tuple[tuple[WorkloadItem, ...], list[float]]:
    arguments = {"count": 100, "vocab_size": 256, "output_len": None, "seed": 0} | more
    workload, times = trace(path, **arguments)
    return workload.items, times


def common(one: WorkloadItem, other: WorkloadItem) -> int:
    """The length of the prefix that both prompts share."""
    pairs = enumerate(zip(one.prompt, other.prompt, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(map(len, (one[0], other[0]))))


def test_trace_prompts_share_the_blocks_that_their_hash_ids_share(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t",
        (1000, 1200, 7, [4, 5, 6]),
        (3500, 1300, 9, [4, 5, 8]),
        (3600, 600, 1, [9, 5]),
    )
    (first, second, third), times = read(path)
    assert [len(ask.prompt) for ask in (first, second, third)] == [1200, 1300, 600]
    assert [ask.new_tokens for ask in (first, second, third)] == [7, 9, 1]
    assert times == [0.0, 2.5, 2.6]
    # The third block's first ids may agree by chance, each with probability 1/256.
    assert 2 * BLOCK_TOKENS <= common(first, second) < 2 * BLOCK_TOKENS + 10
    # Equal hash ids give equal blocks at any position.
    assert third.prompt[BLOCK_TOKENS:] == first.prompt[BLOCK_TOKENS:600]
    assert common(first, third) < 10


def test_tokens_without_a_hash_id_are_unique_to_their_request(tmp_path: Path) -> None:
    (first, second), _ = read(write_trace(tmp_path / "t", (0, 700, 1, [3]), (0, 700, 1, [3])))
    assert BLOCK_TOKENS <= common(first, second) < BLOCK_TOKENS + 10
    assert len(first.prompt) == 700


def test_a_trace_is_cut_to_its_first_requests_and_sorted_by_time(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", (20, 3, 1, []), (10, 4, 0, []), (0, 5, 1, []))
    asks, times = read(path, count=2, output_len=6)
    assert [(len(ask.prompt), ask.new_tokens) for ask in asks] == [(4, 6), (3, 6)]
    assert times == [0.0, 0.01]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1}', "line 2: "),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: .*input_length"),
        ("\n\n", "holds no request"),
    ],
)
def test_a_bad_trace_line_is_named_in_the_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(CommandError, match=problem):
        read(tmp_path / "t")


def test_a_trace_keeps_its_times_unless_self_timed_is_off(tmp_path: Path) -> None:
    path = str(write_trace(tmp_path / "t", (0, 3, 1, []), (50, 3, 1, [])))

    def times(**more: Any) -> list[float]:
        options = ServeOptions(dataset_name="trace", dataset_path=path, **more)
        return [one.at for one in plan(options, None, lambda count: [9.0] * count)]

    assert times() == [0.0, 0.05]
    assert times(self_timed=False) == [9.0, 9.0]


def test_random_prompts_have_the_requested_lengths() -> None:
    options = ServeOptions(
        num_prompts=3, random_input_len=20, random_output_len=5, random_prefix_len=4
    )
    planned = plan(options, None, lambda count: [0.5] * count)
    assert [(one.at, len(one.item.prompt), one.item.new_tokens) for one in planned] == [
        (0.5, 24, 5)
    ] * 3
    assert len({one.item.prompt[:4] for one in planned}) == 1
    assert len({one.item.prompt for one in planned}) == 3


def test_a_conversation_s_first_turn_is_the_prompt_text(tmp_path: Path) -> None:
    turns = [{"value": "what is a block?"}, {"value": "16 tokens"}]
    (tmp_path / "f").write_text(json.dumps([{"conversations": turns}]))
    options = ServeOptions(
        dataset_name="sharegpt", dataset_path=str(tmp_path / "f"), tokenizer="bytes"
    )
    [request] = plan(options, read_tokenizer(None), lambda count: [0.0] * count)
    assert request == Planned(0.0, WorkloadItem(tuple(b"what is a block?"), len("16 tokens")))


def test_a_completion_body_holds_ids_and_a_chat_body_their_text() -> None:
    ask = WorkloadItem(tuple(b"hello"), 9)
    plain = json.loads(Speaker(ServeOptions(), "m", None).body(ask))
    assert plain == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": list(b"hello"),
        "max_tokens": 9,
    }
    options = ServeOptions(
        endpoint="/v1/chat/completions", ignore_eos=True, temperature=0.0, return_token_ids=True
    )
    chat = json.loads(Speaker(options, "m", read_tokenizer(None)).body(ask))
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert (chat["max_completion_tokens"], chat["temperature"]) == (9, 0.0)
    assert chat["ignore_eos"] is chat["return_token_ids"] is True
    assert "prompt" not in chat


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"dataset_name": "trace"}, "need --dataset-path FILE"),
        ({"dataset_path": "x"}, "need --dataset-path FILE"),
        ({"dataset_name": "sharegpt", "dataset_path": "x"}, "--tokenizer is missing"),
        ({"endpoint": "/v1/chat/completions"}, "--tokenizer is missing: chat messages"),
        (
            {"dataset_name": "trace", "dataset_path": "x", "random_input_len": 3},
            "--random-input-len is for --dataset-name random",
        ),
    ],
)
def test_conflicting_flags_are_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check_prompts(ServeOptions(**flags))

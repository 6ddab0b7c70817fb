"""What a benchmark sends: the published workload, random prompts, conversations from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton_cli.bench.engine import read_tokenizer
from baton_cli.bench.options import ThroughputOptions
from baton_cli.bench.sharegpt import MOST_PROMPT_TOKENS, sharegpt
from baton_cli.bench.workload import Workload, check_flags, nano_vllm, random_prompts, synthetic
from baton_cli.errors import CommandError, UsageError

VOCAB = 20_000


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(len(ask.prompt), ask.new_tokens) for ask in workload.items]


def test_the_preset_has_the_published_totals() -> None:
    preset = nano_vllm(VOCAB)
    assert len(preset.items) == 256
    assert (preset.prompt_tokens, preset.output_tokens) == (142_827, 133_966)
    assert preset.longest_answer == 1_024
    assert max(prompt + new for prompt, new in lengths(preset)) == 2_011
    assert preset.requests(0)[0].params.temperature == 0.6


def test_num_prompts_takes_the_preset_s_first_requests() -> None:
    part = synthetic(ThroughputOptions(preset="nano-vllm", num_prompts=3), VOCAB)
    assert part.items == nano_vllm(VOCAB).items[:3]


def test_the_preset_is_refused_for_a_vocabulary_that_lacks_its_ids() -> None:
    assert nano_vllm(10_001).items
    with pytest.raises(CommandError, match="draws ids up to 10000; this model has 10000"):
        nano_vllm(10_000)


def test_random_prompts_have_the_requested_lengths() -> None:
    options = ThroughputOptions(num_prompts=5, input_len=7, output_len=3)
    assert lengths(synthetic(options, 50)) == [(7, 3)] * 5
    assert len(synthetic(ThroughputOptions(input_len=1), 50).items) == 1000


def test_random_lengths_vary_within_their_ratio_after_a_shared_prefix() -> None:
    workload = random_prompts(
        50, count=200, input_len=10, output_len=20, range_ratio=0.5, prefix_len=4, seed=1
    )
    assert {prompt for prompt, _ in lengths(workload)} == set(range(4 + 5, 4 + 15 + 1))
    assert {new for _, new in lengths(workload)} == set(range(10, 30 + 1))
    assert len({ask.prompt[:4] for ask in workload.items}) == 1
    assert all(0 <= id < 50 for ask in workload.items for id in ask.prompt)


def test_the_seed_decides_the_random_prompts() -> None:
    def draw(seed: int) -> Workload:
        return random_prompts(50, count=3, input_len=10, output_len=1, seed=seed)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"preset": "nano-vllm", "input_len": 9}, "give --preset or --input-len, not both"),
        ({"preset": "nano-vllm", "num_prompts": 300}, "--num-prompts 300: .* has exactly 256"),
        ({"dataset_name": "sharegpt"}, "--dataset-path FILE belong together"),
        ({"dataset_path": "x.json"}, "--dataset-path FILE belong together"),
        (
            {"dataset_name": "sharegpt", "dataset_path": "x", "random_prefix_len": 1},
            "--random-prefix-len is for --dataset-name random",
        ),
    ],
)
def test_a_flag_without_effect_is_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check_flags(ThroughputOptions(**flags))


def conversations(path: Path, pairs: Sequence[Sequence[str]]) -> Path:
    turns = [[{"from": "human", "value": turn} for turn in pair] for pair in pairs]
    path.write_text(json.dumps([{"id": "x", "conversations": pair} for pair in turns]))
    return path


def read(path: Path, count: int = 100, output_len: int | None = None, seed: int = 0) -> Workload:
    tokenizer = read_tokenizer(None)  # a byte is a token
    return sharegpt(path, tokenizer, count=count, output_len=output_len, seed=seed)


def test_a_conversation_s_first_turn_is_the_prompt_and_its_second_gives_the_output_length(
    tmp_path: Path,
) -> None:
    path = conversations(tmp_path / "f", [["hello there", "general", "more"]])
    [ask] = read(path).items
    assert bytes(ask.prompt) == b"hello there"
    assert ask.new_tokens == len("general")
    assert read(path, output_len=3).items[0].new_tokens == 3


def test_conversations_too_short_or_too_long_are_left_out(tmp_path: Path) -> None:
    longest = "x" * MOST_PROMPT_TOKENS
    left_out = [["hi!", "answer"], ["prompt", "no"], ["alone"], [longest + "x", "answer"]]
    left_out.append([longest, longest + "x"])
    path = conversations(tmp_path / "f", [*left_out, [longest, longest], ["four", "four"]])
    assert sorted(lengths(read(path))) == [(4, 4), (1024, 1024)]


def test_the_seed_decides_which_conversations_are_taken(tmp_path: Path) -> None:
    path = conversations(tmp_path / "f", [[f"prompt {n}", "answer"] for n in range(20)])
    assert len(read(path, count=4).items) == 4
    assert read(path, count=4) == read(path, count=4)
    assert read(path, count=4) != read(path, count=4, seed=1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "holds no conversation of two turns"),
        ("[{", "--dataset-path .*: .*truncated"),
        ('{"conversations": []}', "--dataset-path .*: Expected `array`"),
        (None, "--dataset-path .*: .*No such file"),
    ],
)
def test_an_unusable_dataset_file_is_named_in_the_error(
    content: str | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CommandError, match=problem):
        read(path)

"""`baton generate`: answers on stdout, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_cli.commands.generate import read_prompts, sampling
from baton_cli.commands.generate_options import GenerateOptions
from baton_cli.errors import CommandError
from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import SamplingParams
from tests.support.project.command import baton, baton_process

FLAGS = ("--threads", "1", "--kv-blocks", "64", "--max-tokens", "6", "--ignore-eos")


@pytest.mark.integration
def test_json_has_one_object_per_prompt_with_ids(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the prefill node\n\nevery chunk\n")
    model = ("--model", str(tiny_model("llama-gqa1")), *FLAGS)
    flags = ("--prompts-file", str(prompts), "--json", "--n", "2", "--seed", "3")
    done = baton_process("generate", *model, *flags, "--logprobs", "1")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("the prefill node", "every chunk")
    for one in (first, second):
        assert [choice["index"] for choice in one["choices"]] == [0, 1]
        assert [len(choice["token_ids"]) for choice in one["choices"]] == [6, 6]
        assert len(one["choices"][0]["logprobs"]) == 6
    assert first["choices"][0]["token_ids"] != first["choices"][1]["token_ids"]


@pytest.mark.integration
def test_greedy_text_output_holds_the_answer_alone_and_repeats(
    tiny_model: Callable[[str], Path],
) -> None:
    model = ("--model", str(tiny_model("llama-gqa1")), *FLAGS)
    flags = ("--prompts-file", "-", "--chat", "--temperature", "0")
    done = baton("generate", *model, *flags, given="a name\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == baton("generate", *model, *flags, given="a name\n").stdout


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "baton: nothing to answer: give --prompt or --prompts-file"),
        (["--prompt", "x"], "baton: --model is missing"),
        (["--prompt", "x", "--model", "/no/such"], "baton: --model /no/such: the folder does not"),
        (["--prompts-file", "/no/such"], "baton: --prompts-file /no/such: "),
    ],
)
def test_a_usage_error_is_one_line_on_stderr(flags: list[str], line: str) -> None:
    done = baton("generate", *flags)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(line)


def test_flags_win_over_the_model_s_own_sampling_defaults() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20)
    params = sampling(GenerateOptions(temperature=0, stop=("a", "b")), defaults)
    assert (params.temperature, params.top_k, params.stop) == (0, 20, ("a", "b"))


def test_a_wrong_sampling_flag_is_named_in_the_error() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 9"):
        sampling(GenerateOptions(max_tokens=4, min_tokens=9), SamplingParams())


def test_a_prompts_file_of_empty_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text("\n  \n")
    with pytest.raises(CommandError, match="holds no prompt"):
        read_prompts(GenerateOptions(prompts_file=str(path)))

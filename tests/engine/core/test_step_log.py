"""--log-steps: each step is a line with its sequences, their tokens, and why others wait."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings, build_sim
from tests.support.engines.engine_core import drive, make_request

Capture = pytest.CaptureFixture[str]
NGRAM = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 2}'


def sim(**settings: Any) -> EngineCore:
    usual: dict[str, Any] = {"num_blocks": 6, "block_size": 4, "log_steps": "json"}
    return build_sim(SimSettings(**(usual | settings)))


def lines(capture: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capture.readouterr().err.splitlines()]


def work(line: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    return [
        (each["request"], each["why"], each["start"], each["tokens"]) for each in line["scheduled"]
    ]


def waits(line: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["request"], each["why"]) for each in line["waiting"]]


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_says_what_it_computes_and_why_others_wait(
    capsys: Capture, overlap: bool
) -> None:
    engine = sim(max_batched_tokens=5, overlap=overlap)
    for name, prompt in (("a", 7), ("b", 4), ("c", 16)):
        engine.submit(make_request(name, prompt, max_tokens=3))
    drive(engine)
    first, second, third, *rest = lines(capsys)
    assert work(first) == [("a", "prompt", 0, 5)]
    assert waits(first) == [("b", "max-batched-tokens"), ("c", "max-batched-tokens")]
    assert work(second)[0] == ("a", "prompt", 5, 2)
    assert work(second)[1][:3] == ("b", "prompt", 0)
    assert ("a", "decode", 7, 1) in work(third)
    assert waits(third) == [("c", "blocks")]
    assert [line["step"] for line in (first, second, third, *rest)] == [*range(1, 4 + len(rest))]
    assert all(line["ms"] > 0 for line in (first, second, third, *rest))
    assert sum(line["tokens"] for line in (first, second, third, *rest)) == 7 + 4 + 16 + 3 * 2
    assert rest[-1]["free_blocks"] == rest[-1]["total_blocks"] == 6


def test_preempted_sequences_and_those_that_are_computed_again_are_named(capsys: Capture) -> None:
    engine = sim(num_blocks=4)
    for name in ("old", "young"):
        engine.submit(make_request(name, 2, max_tokens=8))
    drive(engine)
    steps = lines(capsys)
    [at] = [place for place, step in enumerate(steps) if step["preempted"]]
    assert (steps[at]["preempted"], waits(steps[at])) == (["young"], [("young", "preemption")])
    assert [each for step in steps for each in work(step) if each[1] == "again"] == [
        ("young", "again", 4, 5)
    ]


def test_a_step_with_as_many_sequences_as_allowed_lets_others_wait(capsys: Capture) -> None:
    engine = sim(max_num_seqs=1)
    for name in ("a", "b"):
        engine.submit(make_request(name, 3, max_tokens=2))
    drive(engine)
    assert waits(lines(capsys)[0]) == [("b", "max-num-seqs")]


def test_drafts_are_counted_beside_the_token_before_them(capsys: Capture) -> None:
    engine = sim(num_blocks=64, speculative_config=NGRAM)
    engine.submit(make_request("a", [1, 2, 3] * 4, max_tokens=40, ignore_eos=True))
    drive(engine)
    rows = [each for line in lines(capsys) for each in line["scheduled"]]
    drafted = [each for each in rows if "drafts" in each]
    assert drafted
    assert all(each["tokens"] == 1 + each["drafts"] for each in drafted)
    new = sum(1 + each.get("accepted", 0) for each in rows if each["why"] == "decode")
    assert new >= 39  # accepted drafts after the last token are not new ones


def test_a_line_of_text_has_the_same_facts(capsys: Capture) -> None:
    engine = sim(log_steps="text", max_num_seqs=1)
    for name in ("a", "b"):
        engine.submit(make_request(name, 3, max_tokens=2))
    drive(engine)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1 of ")
    assert first.endswith("blocks free; a prompt 0-3 of 3; waiting b (max-num-seqs)")
    assert " ms, 1 tokens of 1 sequences, " in second
    assert second.endswith("; a decode 3; waiting b (max-num-seqs)")


def test_limits_of_steps_change_only_between_requests_and_within_the_plan() -> None:
    engine = sim(log_steps="off", max_batched_tokens=8, max_num_seqs=2)
    for tokens, seqs in ((9, 1), (0, 1), (8, 3)):
        with pytest.raises(ValueError, match="are not planned"):
            engine.limit_steps(tokens, seqs)
    engine.limit_steps(3, 1)
    engine.submit(make_request("a", 7, max_tokens=1))
    with pytest.raises(ValueError, match="while requests run"):
        engine.limit_steps(8, 2)
    assert [result.num_tokens for result in drive(engine).steps] == [3, 3, 1]


def test_without_the_option_nothing_is_written(capsys: Capture) -> None:
    engine = sim(log_steps="off")
    engine.submit(make_request("a", 3, max_tokens=2))
    drive(engine)
    assert capsys.readouterr().err == ""

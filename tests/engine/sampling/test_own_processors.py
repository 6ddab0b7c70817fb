"""Logits processors of other packages: found by name and by entry point, and used by the requests
that ask for them alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from baton_engine import LLM, SamplingParams
from baton_engine.config import request_processors
from baton_engine.config.request_processors import GROUP, load_processors
from baton_engine.errors import SettingsError
from baton_protocol.errors import InvalidRequest
from tests.support.engines.counting import COUNTING
from tests.support.engines.tiny_models import VOCAB, prompt_of

PLAIN = SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True, logprobs=2)
COUNTED = SamplingParams(
    temperature=1.0, seed=4, n=2, max_tokens=8, ignore_eos=True, extra_args={"count_from": 100}
)


def test_only_requests_that_use_one_are_changed(tiny_model: Callable[[str], Path]) -> None:
    def make_llm(**options: Any) -> LLM:
        folder = tiny_model("qwen3-gqa4")
        return LLM(folder, dtype="float32", threads=1, kv_blocks=50, **options)

    prompts = [prompt_of(20, seed=2), prompt_of(9, seed=3)]
    [expected] = make_llm().generate(prompts[0], PLAIN)
    for more in ({}, {"speculative_config": '{"method": "suffix"}', "max_batched_tokens": 7}):
        llm = make_llm(logits_processors=COUNTING, **more)
        plain, counted = llm.generate(prompts, [PLAIN, COUNTED])
        assert plain.outputs == expected.outputs
        for choice in counted.outputs:
            assert choice.token_ids == [(100 + 9 + place) % VOCAB for place in range(8)]
        for args, words in (
            ({"count_from": "x"}, "count_from is 'x', which is no integer"),
            ({"other": 1}, "other, which no logits processor of this engine uses"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                llm.generate(prompts[0], SamplingParams(extra_args=args))


def test_installed_processors_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("counting", COUNTING, GROUP)]
    monkeypatch.setattr(request_processors, "installed_points", lambda group: points)
    made = load_processors(COUNTING, 7)
    assert [type(each).__name__ for each in made] == ["Counting", "Counting"]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("Counting", "not of the form MODULE:CLASS"),
        ("no_such_module:Counting", "No module named 'no_such_module'"),
        ("tests.support.engines.counting:Missing", "no attribute 'Missing'"),
        ("builtins:int", "no method change_for"),
        ("builtins:list", "not iterable"),
    ],
)
def test_one_that_cannot_be_made_is_an_error_at_the_start(named: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        load_processors(named, 7)
    assert f"--logits-processors {named!r}".replace("'", "") in str(caught.value).replace("'", "")

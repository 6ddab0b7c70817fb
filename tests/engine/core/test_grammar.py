"""Requests with a grammar: their outputs, how they finish, and the requests that run with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.errors import GrammarDeadEnd, InvalidRequest
from baton_protocol.request import Request
from baton_protocol.sampling import StructuredOutput
from baton_text.artifacts import BYTE_EOS_ID, byte_artifacts
from baton_text.grammars.constraints import Kind, grammar_of
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.limits import JSON_OPTIONS
from baton_text.tokenizer import Tokenizer
from tests.support.engines.engine_core import Run, drive, make_request, scripted

GRAMMARS = Grammars(Tokenizer.from_artifacts(byte_artifacts()))
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "pages": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 2},
    },
    "required": ["title", "pages", "tags"],
    "additionalProperties": False,
}
KINDS: list[tuple[Kind, Any]] = [
    ("json", BOOK),
    ("regex", r"(\d\d:)+\d\d|never"),
    ("choice", ["yes", "no", "perhaps"]),
    ("grammar", 'start: "<" WORD ">"\nWORD: /[a-z]{1,12}/'),
]


def sim(**settings: Any) -> EngineCore:
    return build_sim(SimSettings(**{"block_size": 4, "chunk_blocks": 2, **settings}))


def submit(engine: EngineCore, kind: Kind, value: Any, name: str = "r", **params: Any) -> Request:
    grammar = grammar_of(kind, value)
    params.setdefault("max_tokens", 200)
    request = make_request(name, 9, structured=StructuredOutput(grammar), **params)
    if request.params.n > 1:
        request = make_request(
            name, 9, ((),) * request.params.n, structured=StructuredOutput(grammar), **params
        )
    engine.submit(request, matcher=GRAMMARS.matcher(grammar))
    return request


def text_of(run: Run, name: str = "r", choice: int = 0) -> bytes:
    return bytes(id for id in run.ids(name, choice) if id != BYTE_EOS_ID)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize(("kind", "value"), KINDS)
def test_output_that_finishes_by_stop_matches_its_grammar(
    kind: Kind, value: Any, seed: int | None
) -> None:
    engine = sim(eos_every=5)
    submit(engine, kind, value, temperature=0.0 if seed is None else 1.0, seed=seed, n=3)
    run = drive(engine)
    for choice in range(3):
        text = text_of(run, choice=choice)
        matcher = GRAMMARS.matcher(grammar_of(kind, value))
        assert matcher.accept(text), text
        stopped = run.last("r", choice).finish == "stop"
        assert matcher.complete == stopped, text
        if kind == "json" and stopped:
            json.loads(text)


def test_a_choice_finishes_where_its_grammar_allows_only_the_end() -> None:
    """The choice ends without an EOS, although ignore_eos and min_tokens are set."""
    engine = sim()
    submit(engine, "choice", ["yes"], ignore_eos=True, min_tokens=50)
    run = drive(engine)
    assert text_of(run) == b"yes"
    assert (run.last("r").finish, run.last("r").stop_id) == ("stop", None)


def test_min_tokens_delays_the_end_that_a_grammar_allows() -> None:
    engine = sim(eos_every=1)
    submit(engine, "regex", "[a-z]+", "short")
    submit(engine, "regex", "[a-z]+", "long", min_tokens=20)
    run = drive(engine)
    assert (len(text_of(run, "short")), len(text_of(run, "long"))) == (1, 20)


def test_bad_words_apply_unless_the_grammar_requires_them() -> None:
    engine = sim()
    word = tuple(b"no")
    submit(engine, "choice", ["no", "nay"], "avoidable", bad_words=(word,))
    submit(engine, "choice", ["no"], "required", bad_words=(word,))
    run = drive(engine)
    assert (text_of(run, "avoidable"), text_of(run, "required")) == (b"nay", b"no")


def test_a_preempted_request_continues_in_its_grammar() -> None:
    """The pool holds one and a half requests, so one is preempted and computed again."""
    alone: list[bytes] = []
    for name in ("a", "b"):
        engine = sim()
        submit(engine, "json", BOOK, name)
        alone.append(text_of(drive(engine), name))
    together = sim(num_blocks=24)
    for name in ("a", "b"):
        submit(together, "json", BOOK, name)
    run = drive(together)
    assert [text_of(run, name) for name in ("a", "b")] == alone
    assert together.load().preemptions_total > 0


# Each allows a step after which nothing can follow, in a way that only such a step shows.
DEAD_ENDS = {
    "empty terminals": 'start: "x" (C | D)\nC: /q/ & /r/\nD: /s/ & /t/',
    "one empty terminal": 'start: "xyz" C\nC: /q/ & /r/',
    "an empty regex": 'start: "x" /[^\\s\\S]/',
    "no name left": LLMatcher.grammar_from_json_schema(
        {"type": "object", "additionalProperties": False, "minProperties": 2,
         "patternProperties": {"^a$": {"const": 1}}},
        overrides=JSON_OPTIONS,
    ),
}  # fmt: skip


def dead(name: str, **params: Any) -> Request:
    outputs = ((),) * params.get("n", 1)
    structured = StructuredOutput(DEAD_ENDS[name])
    return make_request("dead", 9, outputs, structured=structured, **{"max_tokens": 99, **params})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", DEAD_ENDS)
def test_a_dead_end_of_a_grammar_is_an_error_and_never_a_finish(
    name: str, n: int, overlap: bool
) -> None:
    """The tokens before it are reported, other requests go on, and no block is lost."""
    engine = sim(overlap=overlap, eos_every=3)
    free = engine.load().free_blocks
    submit(engine, "choice", ["perhaps"], "other")
    request = dead(name, n=n, temperature=1.0, seed=1)
    engine.submit(request, matcher=GRAMMARS.matcher(DEAD_ENDS[name]))
    run = drive(engine)
    [failed] = [each for step in run.steps for each in step.failed]
    assert (failed.request, failed.error.reason) == ("dead", "grammar_dead_end")
    assert not failed.error.retryable
    assert DEAD_ENDS[name][:100] in failed.error.message
    assert [token.finish for token in run.tokens if token.request == "dead" and token.finish] == []
    assert any(token.request == "dead" for token in run.tokens)
    assert text_of(run, "other") == b"perhaps"
    assert sorted(run.finished) == ["dead", "other"]
    assert engine.load().grammar_dead_ends_total == 1
    assert engine.load().free_blocks == free


@pytest.mark.parametrize(
    "params", [{"ignore_eos": True}, {"min_tokens": 9}, {"bad_words": ((257,),)}]
)
def test_no_parameter_turns_a_dead_end_into_a_finish(params: dict[str, Any]) -> None:
    engine = sim(eos_every=1)
    engine.submit(
        dead("empty terminals", **params), matcher=GRAMMARS.matcher(DEAD_ENDS["empty terminals"])
    )
    run = drive(engine)
    assert [failed.error.reason for step in run.steps for failed in step.failed] == [
        "grammar_dead_end"
    ]


def test_a_request_that_is_taken_over_in_a_dead_end_is_refused_by_the_engine() -> None:
    """Its last node may have been lost before it reported the error."""
    engine = sim()
    structured = StructuredOutput(DEAD_ENDS["one empty terminal"])
    for text in (b"xyq", b"xyz" + bytes([66])):
        request = make_request("r", 9, (tuple(text),), max_tokens=99, structured=structured)
        with pytest.raises(GrammarDeadEnd, match="does not match"):
            engine.submit(request, matcher=GRAMMARS.matcher(structured.grammar))
    assert not engine.has_work()
    assert engine.load().grammar_dead_ends_total == 2
    request = make_request("r", 9, (tuple(b"xyz"),), max_tokens=99, structured=structured)
    engine.submit(request, matcher=GRAMMARS.matcher(structured.grammar))
    run = drive(engine)
    assert [failed.request for step in run.steps for failed in step.failed] == ["r"]


@pytest.mark.parametrize(
    ("kind", "value", "max_tokens", "finish"),
    [
        ("choice", ["yes"], 3, "stop"),
        ("choice", ["yes"], 2, "length"),
        ("choice", ["yes", "yes!"], 3, "length"),
        ("regex", "a{4}", 4, "stop"),
        ("regex", "a{4,}", 4, "length"),
        ("json", {"const": 1}, 1, "stop"),
        ("grammar", 'start: "ab" C?\nC: /q/ & ~/q/', 2, "stop"),
    ],
)
def test_a_choice_that_is_whole_in_its_last_allowed_token_stops(
    kind: Kind, value: Any, max_tokens: int, finish: str
) -> None:
    engine = sim()
    text = {"choice": b"yes", "regex": b"aaaa", "json": b"1", "grammar": b"ab"}[kind]
    grammar = value if kind == "grammar" else grammar_of(kind, value)
    structured = StructuredOutput(grammar)
    request = make_request("r", 9, max_tokens=max_tokens, structured=structured, ignore_eos=True)
    engine.submit(request, matcher=GRAMMARS.matcher(grammar))
    run = drive(engine)
    assert text.startswith(text_of(run))
    assert run.last("r").finish == finish


def test_a_stop_id_ends_a_choice_only_where_its_text_matches() -> None:
    engine = sim()
    submit(engine, "regex", "(ab){2}c", "in the text", stop_token_ids=(ord("a"), ord("b")))
    submit(engine, "regex", "a+", "at its end", stop_token_ids=(ord("a"),))
    run = drive(engine)
    assert (text_of(run, "in the text"), run.last("in the text").finish) == (b"ababc", "stop")
    assert run.last("at its end").stop_id == ord("a")


def test_a_request_submitted_with_a_complete_text_does_not_run() -> None:
    engine = sim()
    grammar = grammar_of("choice", ["yes", "yesterday"])
    request = make_request(
        "r", 9, (tuple(b"yesterday"),), max_tokens=50, structured=StructuredOutput(grammar)
    )
    engine.submit(request, matcher=GRAMMARS.matcher(grammar))
    run = drive(engine)
    [complete] = run.complete
    assert (complete.finish, complete.stop_id, run.tokens) == ("stop", None, [])


def test_other_requests_overlap_while_a_grammar_row_waits_for_its_token() -> None:
    """Only the grammar's row waits until the last step is read. The other request has a row in each
    step until it finishes."""
    engine, runner = scripted(lambda sample: ord("a"), overlap=True)
    submit(engine, "regex", "a{8}")
    engine.submit(make_request("plain", 9, max_tokens=8))
    run = drive(engine)
    assert [len(run.ids(name)) for name in ("r", "plain")] == [8, 8]
    plain_rows = [[row.samples[0].matcher is None for row in rows] for rows in runner.steps]
    assert all(True in rows for rows in plain_rows[:8]), plain_rows
    assert [False in rows for rows in plain_rows[:4]] == [True, False, True, False], plain_rows


def test_a_grammar_without_its_matcher_and_a_grammar_with_allowed_ids_are_refused() -> None:
    engine = sim()
    structured = StructuredOutput(grammar_of("regex", "a"))
    with pytest.raises(ValueError, match="come together"):
        engine.submit(make_request("r", 9, structured=structured))
    request = make_request("r", 9, structured=structured, allowed_token_ids=(97,))
    with pytest.raises(InvalidRequest, match="leave out one"):
        engine.submit(request, matcher=GRAMMARS.matcher(structured.grammar))

"""Requests with a grammar: what they say, how they end, and what is beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.errors import InvalidRequest
from baton_protocol.request import Request
from baton_protocol.sampling import StructuredOutput
from baton_text.artifacts import BYTE_EOS_ID, byte_artifacts
from baton_text.grammar import Grammars, Kind, grammar_of
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
def test_an_answer_that_stops_matches(kind: Kind, value: Any, seed: int | None) -> None:
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


def test_a_choice_ends_where_only_the_end_could_follow() -> None:
    """Without an EOS of its own, and although EOS is ignored and more tokens are wanted."""
    engine = sim()
    submit(engine, "choice", ["yes"], ignore_eos=True, min_tokens=50)
    run = drive(engine)
    assert text_of(run) == b"yes"
    assert (run.last("r").finish, run.last("r").stop_id) == ("stop", None)


def test_min_tokens_keeps_a_text_from_ending_early() -> None:
    engine = sim(eos_every=1)
    submit(engine, "regex", "[a-z]+", "short")
    submit(engine, "regex", "[a-z]+", "long", min_tokens=20)
    run = drive(engine)
    assert (len(text_of(run, "short")), len(text_of(run, "long"))) == (1, 20)


def test_bad_words_bend_a_text_only_where_it_can_be_bent() -> None:
    engine = sim()
    word = tuple(b"no")
    submit(engine, "choice", ["no", "nay"], "bent", bad_words=(word,))
    submit(engine, "choice", ["no"], "straight", bad_words=(word,))
    run = drive(engine)
    assert (text_of(run, "bent"), text_of(run, "straight")) == (b"nay", b"no")


def test_a_preempted_request_goes_on_in_its_grammar() -> None:
    """Blocks for one and a half requests: one of them begins again from its tokens."""
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


def test_what_is_complete_already_runs_no_more() -> None:
    engine = sim()
    grammar = grammar_of("choice", ["yes", "yesterday"])
    request = make_request(
        "r", 9, (tuple(b"yesterday"),), max_tokens=50, structured=StructuredOutput(grammar)
    )
    engine.submit(request, matcher=GRAMMARS.matcher(grammar))
    run = drive(engine)
    [complete] = run.complete
    assert (complete.finish, complete.stop_id, run.tokens) == ("stop", None, [])


def test_requests_beside_it_run_ahead() -> None:
    """With overlap a step is launched before the last is read. That depends on the token read for
    the grammar's row alone: the other one has a part in each step until it ends."""
    engine, runner = scripted(lambda sample: ord("a"), overlap=True)
    submit(engine, "regex", "a{8}")
    engine.submit(make_request("plain", 9, max_tokens=8))
    run = drive(engine)
    assert [len(run.ids(name)) for name in ("r", "plain")] == [8, 8]
    shares = [[row.samples[0].matcher is None for row in rows] for rows in runner.steps]
    assert all(True in rows for rows in shares[:8]), shares
    assert [False in rows for rows in shares[:4]] == [True, False, True, False], shares


def test_a_grammar_and_its_matcher_come_together() -> None:
    engine = sim()
    structured = StructuredOutput(grammar_of("regex", "a"))
    with pytest.raises(ValueError, match="come together"):
        engine.submit(make_request("r", 9, structured=structured))
    request = make_request("r", 9, structured=structured, allowed_token_ids=(97,))
    with pytest.raises(InvalidRequest, match="leave out one"):
        engine.submit(request, matcher=GRAMMARS.matcher(structured.grammar))

"""How token ids become deltas: text, stop strings, logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.interface import TokenOut
from baton_node.server.detokenize import ChoiceText
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_text.artifacts import BYTE_EOS_ID, byte_artifacts
from baton_text.tokenizer import Tokenizer
from tests.support.nodes.processes import make_request

TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())


def token(id: int, offset: int, **fields: object) -> TokenOut:
    return TokenOut(RequestId("r"), 1, 0, offset, id, **fields)  # type: ignore[arg-type]


def push(reply: bytes, *, known: int = 0, end: bool = True, **params: Any) -> list[Delta]:
    """Return the deltas of reply[known:], up to the end of the choice."""
    text = ChoiceText(TOKENIZER, make_request("r", b"p", **params), tuple(reply[:known]))
    deltas = []
    for offset in range(known, len(reply)):
        last = end and offset == len(reply) - 1
        deltas.append(text.push(token(reply[offset], offset, finish="length" if last else None)))
        if deltas[-1].finish:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_each_id_is_sent_at_once_even_while_its_text_is_held_back() -> None:
    deltas = push("aé".encode(), end=False)
    assert [delta.ids for delta in deltas] == [(97,), (0xC3,), (0xA9,)]
    assert [delta.text for delta in deltas] == ["a", "", "é"]
    assert [delta.offset for delta in deltas] == [0, 1, 2]


def test_a_stop_string_ends_the_choice_with_the_token_that_completed_it() -> None:
    deltas = push(b"one two three", stop=("two",))
    assert text_of(deltas) == "one "
    assert len(deltas) == len(b"one two")
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", "two")


def test_the_text_includes_the_stop_string_on_request() -> None:
    deltas = push(b"one two three", stop=("two",), include_stop_str_in_output=True)
    assert text_of(deltas) == "one two"


def test_text_held_back_for_a_stop_string_is_sent_at_the_end() -> None:
    assert text_of(push(b"one tw", stop=("two",))) == "one tw"
    assert text_of(push(b"one tw", stop=("two",), end=False)) == "one "


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_a_stop_string_that_the_last_allowed_token_completes_ends_with_length_O_REQ_3b(
    include: bool, text: str
) -> None:
    deltas = push(b"one two", stop=("two",), include_stop_str_in_output=include)
    assert (deltas[-1].finish, deltas[-1].stop) == ("length", None)
    assert text_of(deltas) == text


def test_a_stop_id_as_the_last_allowed_token_ends_with_length_O_REQ_3b() -> None:
    text = ChoiceText(TOKENIZER, make_request("r", b"p", stop_token_ids=(66,)), ())
    last = text.push(token(66, 0, finish="length"))
    assert (last.finish, last.stop) == ("length", None)


def test_a_stop_at_a_stop_id_names_the_id_and_a_stop_at_eos_names_none() -> None:
    text = ChoiceText(TOKENIZER, make_request("r", b"p", stop_token_ids=(66,)), ())
    stopped = text.push(token(66, 0, finish="stop", stop_id=66))
    assert (stopped.finish, stopped.stop, stopped.text) == ("stop", 66, "")
    plain = ChoiceText(TOKENIZER, make_request("r", b"p"), ())
    ended = plain.push(token(BYTE_EOS_ID, 0, finish="stop", stop_id=BYTE_EOS_ID))
    assert (ended.finish, ended.stop, ended.text) == ("stop", None, "")


def test_the_text_of_a_stop_id_is_sent_only_on_request() -> None:
    request = make_request("r", b"p", stop_token_ids=(66,), include_stop_str_in_output=True)
    text = ChoiceText(TOKENIZER, request, ())
    assert text.push(token(65, 0)).text == "A"
    assert text.push(token(66, 1, finish="stop", stop_id=66)).text == "B"


def test_without_detokenize_deltas_have_ids_and_ends_but_no_text() -> None:
    request = make_request("r", b"p", stop_token_ids=(66,), detokenize=False)
    text = ChoiceText(TOKENIZER, request, ())
    assert (text.push(token(65, 0)).ids, text.push(token(67, 1)).text) == ((65,), "")
    last = text.push(token(66, 2, finish="stop", stop_id=66))
    assert (last.ids, last.text, last.finish, last.stop) == ((66,), "", "stop", 66)


@given(st.text(max_size=12), st.data())
def test_a_continued_choice_neither_repeats_nor_loses_text(reply: str, data: st.DataObject) -> None:
    raw = reply.encode()
    stop = tuple(data.draw(st.lists(st.text("ab", min_size=1, max_size=2), max_size=2)))
    known = data.draw(st.integers(0, len(raw)))
    before = push(raw[:known], stop=stop, end=False)
    if before and before[-1].finish:
        return
    after = push(raw, known=known, stop=stop)
    if known < len(raw):
        assert text_of(before) + text_of(after) == text_of(push(raw, stop=stop))


@pytest.mark.parametrize("top", [0, 2])
def test_logprobs_have_the_text_of_their_tokens(top: int) -> None:
    candidates = tuple(TokenLogprob(id=0xC3 + i, logprob=-1.0, rank=i) for i in range(top))
    logprobs = PositionLogprobs(TokenLogprob(id=97, logprob=-0.5, rank=1), candidates)
    text = ChoiceText(TOKENIZER, make_request("r", b"p", logprobs=top), ())
    (named,) = text.push(token(97, 0, logprobs=logprobs)).logprobs
    assert (named.sampled.text, named.sampled.raw) == ("a", b"a")
    assert [candidate.raw for candidate in named.top] == [bytes([0xC3 + i]) for i in range(top)]

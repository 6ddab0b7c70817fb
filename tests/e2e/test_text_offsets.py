"""Offsets of tokens in a completion's text, from the node's detokenizer to the router's JSON.

Whatever the prompt and the answer are made of: `text_offset` is where in the returned text a
token's own begins, in one piece and in a stream, and also where another node takes over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_node.ipc.messages import Token
from baton_node.server.detokenize import ChoiceText, context
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_protocol.sampling import SamplingParams
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.completions import CompletionCall
from baton_router.openai.endpoint import ChoiceOutput
from baton_text.artifacts import read_artifacts
from baton_text.detokenizer import TextReader
from baton_text.logprobs import named
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import FAMILIES

TOKENIZERS = {name: Tokenizer.from_artifacts(make()) for name, make in FAMILIES.items()}
COMMON = CommonFields(id="cmpl-1", created=1, model="m", system_fingerprint="f")
USAGE = Usage.of(1, 1, cached=0)
WORDS = st.sampled_from(["stop", " the", "\n", "  ", "a", "日本", "ü", "e\u0301", "😀", "</s>"])
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=6).map("".join)
Ids = tuple[int, ...]


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[Ids]:
    """Texts, parts of characters, special ids and ids that the tokenizer does not know."""
    one = st.integers(0, tokenizer.vocab_size + 1) | st.sampled_from(sorted(tokenizer.special_ids))
    senseless = st.lists(one, max_size=6)
    sensible = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    parts = st.lists(senseless | sensible, min_size=1, max_size=3)
    return parts.map(lambda lists: tuple(id for ids in lists for id in ids))


def position(id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(id, -1.0))


def deltas(
    tokenizer: Tokenizer, request: Request, answers: list[Ids], moves_at: int
) -> list[Delta]:
    """What nodes send of these answers: token by token, and from `moves_at` on another node's."""
    before = context(tokenizer, request)
    prompt = named(tokenizer, [position(id) for id in request.prompt_ids[1:]])
    told: list[Delta] = []
    for choice, ids in enumerate(answers):
        texts = ChoiceText(tokenizer, request, (), before)
        for offset, id in enumerate(ids):
            if offset == moves_at:
                texts = ChoiceText(tokenizer, request, ids[:offset], before)
            end: Literal["length"] | None = "length" if offset + 1 == len(ids) else None
            told.append(
                texts.push(Token(request.id, 1, choice, offset, id, end, logprobs=position(id)))
            )
            if told[-1].finish:
                break
    if prompt and told:
        told[0] = msgspec.structs.replace(told[0], prompt_logprobs=prompt)
    return told


def ask(body: Any, tokenizer: Tokenizer, answers: list[Ids], moves_at: int) -> tuple[Any, Any, Ids]:
    """The choices of the answer in one piece; each choice's, put together from the stream's; and
    the prompt's ids."""
    call = CompletionCall.parse(json.dumps(body).encode())
    [given] = call.given
    ids = (
        given
        if isinstance(given, tuple)
        else tuple(tokenizer.encode(given.text, given.add_special_tokens))
    )
    params = SamplingParams(**call.sampling)
    request = Request(
        id=RequestId("r"),
        attempt=1,
        prompt_ids=ids,
        params=params,
        outputs=((),) * params.n,
        continues_prompt=True,
    )
    sent = deltas(tokenizer, request, answers, moves_at)
    gathered = [ChoiceOutput() for _ in answers]
    for delta in sent:
        gathered[delta.choice].add(delta)
    whole = json.loads(call.shape(COMMON, [ids], tokenizer).answer(gathered, USAGE))["choices"]
    shape = call.shape(COMMON, [ids], tokenizer)
    events = [shape.event(delta.choice, delta) for delta in sent]
    streamed: list[Any] = [{"text": "", "tokens": [], "text_offset": []} for _ in answers]
    for event in filter(None, events):
        [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
        mine = streamed[choice["index"]]
        mine["text"] += choice["text"]
        for name in ("tokens", "text_offset"):
            mine[name] += choice["logprobs"][name]
    return whole, streamed, ids


def begins(text: str, place: int, name: str) -> bool:
    """Whether the token of this name begins there, or what it reads as at the start of a text:
    without its space, or with the mark of a word that goes on. Parts of characters are bytes of the
    one that is there, or are no UTF-8."""
    at = text[place:]
    if not name.startswith("bytes:"):
        return at.startswith((name, name.lstrip(" "), "##" + name))
    first = int(name[len(r"bytes:\x") :][:2], 16)
    return at[:1] == "\ufffd" or first in at[:1].encode()


def check(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = TEXTS.filter(tokenizer.encode)
    prompt: Any = data.draw(texts | any_ids(tokenizer).filter(bool))
    n = data.draw(st.integers(1, 2))
    answers = [data.draw(any_ids(tokenizer).filter(bool)) for _ in range(n)]
    echo, skip = data.draw(st.booleans()), data.draw(st.booleans())
    stop = data.draw(st.sampled_from([[], ["stop"], ["the", "a\n"]]))
    body = {"prompt": prompt, "echo": echo, "logprobs": 0, "n": n, "stop": stop}
    body |= {"max_tokens": max(map(len, answers)), "skip_special_tokens": skip}
    whole, streamed, ids = ask(body, tokenizer, answers, data.draw(st.integers(0, 9)))
    behind = len(ids) if echo else 0
    for choice, part, answer in zip(whole, streamed, answers, strict=True):
        text, told = choice["text"], choice["logprobs"]
        offsets = told["text_offset"]
        assert part["text"] == text
        assert part["tokens"] == told["tokens"]
        assert [min(place, len(text)) for place in part["text_offset"]] == offsets
        assert len(offsets) == len(told["tokens"])
        assert offsets == sorted(offsets)
        assert 0 <= offsets[0] <= offsets[-1] <= len(text)
        if stop:
            continue  # some text of the last tokens may be cut off
        for at, (place, id) in enumerate(zip(offsets, (*ids[:behind], *answer), strict=True)):
            as_written = isinstance(prompt, str) and at < behind
            hidden = at >= behind and skip and id in tokenizer.special_ids
            if not (as_written or hidden or not tokenizer.token_bytes(id)):
                assert begins(text, place, told["tokens"][at])


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_token_has_its_place_in_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    check(tokenizer, data)


def test_every_token_has_its_place_in_the_text_with_the_demo_model_too(demo_model: Path) -> None:
    demo = Tokenizer.from_artifacts(read_artifacts(demo_model))

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        check(demo, data)

    holds()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_an_echo_of_ids_and_its_answer_read_as_all_their_ids(data: st.DataObject) -> None:
    """Where no special token stands between them, over which a character may go on."""
    tokenizer = TOKENIZERS["byte-level"]
    plain = any_ids(tokenizer).map(
        lambda ids: tuple(id for id in ids if id not in tokenizer.special_ids)
    )
    prompt, answer = data.draw(plain.filter(bool)), data.draw(plain.filter(bool))
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": len(answer)}
    [whole], _, _ = ask(body, tokenizer, [answer], 0)
    reader = TextReader(tokenizer, skip_special=False)
    assert whole["text"] == reader.read(prompt + answer) + reader.finish()


def test_without_detokenize_all_of_an_answer_stands_behind_the_echo() -> None:
    body = {"prompt": [72, 105], "echo": True, "logprobs": 0, "max_tokens": 2}
    body |= {"detokenize": False, "return_token_ids": True}
    [whole], [part], _ = ask(body, TOKENIZERS["bytes"], [(65, 66)], 0)
    assert whole["text"] == part["text"] == "Hi"
    assert whole["logprobs"]["text_offset"] == part["text_offset"] == [0, 1, 2, 2]


def test_what_a_stop_string_cut_off_stands_at_the_end() -> None:
    body = {"prompt": [72], "echo": True, "logprobs": 0, "stop": ["BC"], "max_tokens": 4}
    [whole], [part], _ = ask(body, TOKENIZERS["bytes"], [tuple(b"ABCD")], 0)
    assert whole["text"] == part["text"] == "HA"
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 2]
    assert part["text_offset"] == [0, 1, 2, 3]  # it was told before the stop string was complete


def test_an_answer_begins_behind_the_echo_with_the_space_that_its_token_has() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    the = tuple(tokenizer.encode("the", add_special_tokens=False))
    assert len(the) == 1
    body = {"echo": True, "logprobs": 0, "max_tokens": 1}
    for prompt in ("the", the):
        [whole], _, _ = ask(body | {"prompt": prompt}, tokenizer, [the], 0)
        assert (whole["text"], whole["logprobs"]["text_offset"]) == ("the the", [0, 3])

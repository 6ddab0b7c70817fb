"""Offsets of tokens in a completion's text, from the node's detokenizer to the router's JSON.

For any prompt and any output, `text_offset` is the position in the returned text at which a token's
text begins. This holds with and without streaming, and when another node continues the request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.interface import TokenOut
from baton_node.server.detokenize import ChoiceText, context
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_protocol.sampling import SamplingParams
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.completions import CompletionCall
from baton_text.artifacts import read_artifacts
from baton_text.detokenizer import TextReader
from baton_text.logprobs import add_token_texts
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import FAMILIES, tokenizer_of

COMMON = CommonFields(id="cmpl-1", created=1, model="m", system_fingerprint="f")
USAGE = Usage.of(1, 1, cached=0)
WORDS = st.sampled_from(["stop", " the", "\n", "  ", "a", "日本", "ü", "e\u0301", "😀", "</s>"])
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=6).map("".join)
Ids = tuple[int, ...]


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[Ids]:
    """Ids of texts, parts of characters, special ids and ids outside the vocabulary."""
    any_id = st.integers(0, tokenizer.vocab_size + 1) | st.sampled_from(
        sorted(tokenizer.special_ids)
    )
    random_ids = st.lists(any_id, max_size=6)
    text_ids = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    parts = st.lists(random_ids | text_ids, min_size=1, max_size=3)
    return parts.map(lambda lists: tuple(id for ids in lists for id in ids))


def position(id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(id, -1.0))


def deltas(
    tokenizer: Tokenizer, request: Request, outputs: list[Ids], moves_at: int
) -> list[Delta]:
    """The deltas that nodes send for these outputs, one per token. Another node continues at offset
    `moves_at`."""
    before = context(tokenizer, request)
    prompt = add_token_texts(tokenizer, [position(id) for id in request.prompt_ids[1:]])
    result: list[Delta] = []
    for choice, ids in enumerate(outputs):
        texts = ChoiceText(tokenizer, request, (), before)
        for offset, id in enumerate(ids):
            if offset == moves_at:
                texts = ChoiceText(tokenizer, request, ids[:offset], before)
            end: Literal["length"] | None = "length" if offset + 1 == len(ids) else None
            result.append(
                texts.push(TokenOut(request.id, 1, choice, offset, id, position(id), end))
            )
            if result[-1].finish:
                break
    if prompt and result:
        result[0] = msgspec.structs.replace(result[0], prompt_logprobs=prompt)
    return result


def respond(
    body: Any, tokenizer: Tokenizer, outputs: list[Ids], moves_at: int
) -> tuple[Any, Any, Ids]:
    """Returns the choices of an unstreamed response, the choices put together from a stream, and
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
    sent = deltas(tokenizer, request, outputs, moves_at)
    gathered = [ChoiceOutput() for _ in outputs]
    for delta in sent:
        gathered[delta.choice].add(delta)
    whole = json.loads(call.shape(COMMON, [ids], tokenizer).answer(gathered, USAGE))["choices"]
    shape = call.shape(COMMON, [ids], tokenizer)
    events = [shape.event(delta.choice, delta) for delta in sent]
    streamed: list[Any] = [{"text": "", "tokens": [], "text_offset": []} for _ in outputs]
    for event in filter(None, events):
        [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
        mine = streamed[choice["index"]]
        mine["text"] += choice["text"]
        for name in ("tokens", "text_offset"):
            mine[name] += choice["logprobs"][name]
    return whole, streamed, ids


def begins(text: str, place: int, name: str) -> bool:
    """Whether the token with this name begins at `place` in the text. At the start of a text, a
    token may lose its space or show a continuation mark (`##`). A token that is a part of a
    character begins at a character with that byte, or at a replacement character."""
    at = text[place:]
    if not name.startswith("bytes:"):
        return at.startswith((name, name.lstrip(" "), "##" + name))
    first = int(name[len(r"bytes:\x") :][:2], 16)
    return at[:1] == "\ufffd" or first in at[:1].encode()


def check(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = TEXTS.filter(tokenizer.encode)
    prompt: Any = data.draw(texts | any_ids(tokenizer).filter(bool))
    n = data.draw(st.integers(1, 2))
    outputs = [data.draw(any_ids(tokenizer).filter(bool)) for _ in range(n)]
    echo, skip = data.draw(st.booleans()), data.draw(st.booleans())
    stop = data.draw(st.sampled_from([[], ["stop"], ["the", "a\n"]]))
    body = {"prompt": prompt, "echo": echo, "logprobs": 0, "n": n, "stop": stop}
    body |= {"max_tokens": max(map(len, outputs)), "skip_special_tokens": skip}
    whole, streamed, ids = respond(body, tokenizer, outputs, data.draw(st.integers(0, 9)))
    num_echoed = len(ids) if echo else 0
    for choice, part, output in zip(whole, streamed, outputs, strict=True):
        text, logprobs = choice["text"], choice["logprobs"]
        offsets = logprobs["text_offset"]
        assert part["text"] == text
        assert part["tokens"] == logprobs["tokens"]
        assert [min(place, len(text)) for place in part["text_offset"]] == offsets
        assert len(offsets) == len(logprobs["tokens"])
        assert offsets == sorted(offsets)
        assert 0 <= offsets[0] <= offsets[-1] <= len(text)
        if stop:
            continue  # the text of the last tokens may be cut off
        for at, (place, id) in enumerate(zip(offsets, (*ids[:num_echoed], *output), strict=True)):
            as_written = isinstance(prompt, str) and at < num_echoed
            hidden = at >= num_echoed and skip and id in tokenizer.special_ids
            if not (as_written or hidden or not tokenizer.token_bytes(id)):
                assert begins(text, place, logprobs["tokens"][at])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_each_offset_is_the_position_of_its_tokens_text(family: str, data: st.DataObject) -> None:
    check(tokenizer_of(family), data)


def test_each_offset_is_the_position_of_its_tokens_text_with_the_demo_model(
    demo_model: Path,
) -> None:
    demo = Tokenizer.from_artifacts(read_artifacts(demo_model))

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        check(demo, data)

    holds()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_an_echo_of_ids_plus_its_output_decodes_like_all_ids_together(data: st.DataObject) -> None:
    """Without special tokens, because a character may continue across a hidden one."""
    tokenizer = tokenizer_of("byte-level")
    plain = any_ids(tokenizer).map(
        lambda ids: tuple(id for id in ids if id not in tokenizer.special_ids)
    )
    prompt, output = data.draw(plain.filter(bool)), data.draw(plain.filter(bool))
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": len(output)}
    [whole], _, _ = respond(body, tokenizer, [output], 0)
    reader = TextReader(tokenizer, skip_special=False)
    assert whole["text"] == reader.read(prompt + output) + reader.finish()


def test_without_detokenize_all_output_offsets_are_at_the_end_of_the_echo() -> None:
    body = {"prompt": [72, 105], "echo": True, "logprobs": 0, "max_tokens": 2}
    body |= {"detokenize": False, "return_token_ids": True}
    [whole], [part], _ = respond(body, tokenizer_of("bytes"), [(65, 66)], 0)
    assert whole["text"] == part["text"] == "Hi"
    assert whole["logprobs"]["text_offset"] == part["text_offset"] == [0, 1, 2, 2]


def test_offsets_of_text_cut_off_by_a_stop_string_are_at_the_end() -> None:
    body = {"prompt": [72], "echo": True, "logprobs": 0, "stop": ["BC"], "max_tokens": 4}
    [whole], [part], _ = respond(body, tokenizer_of("bytes"), [tuple(b"ABCD")], 0)
    assert whole["text"] == part["text"] == "HA"
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 2]
    assert part["text_offset"] == [0, 1, 2, 3]  # sent before the stop string was complete


def test_an_output_after_an_echo_keeps_the_leading_space_of_its_first_token() -> None:
    tokenizer = tokenizer_of("metaspace")
    the = tuple(tokenizer.encode("the", add_special_tokens=False))
    assert len(the) == 1
    body = {"echo": True, "logprobs": 0, "max_tokens": 1}
    for prompt in ("the", the):
        [whole], _, _ = respond(body | {"prompt": prompt}, tokenizer, [the], 0)
        assert (whole["text"], whole["logprobs"]["text_offset"]) == ("the the", [0, 3])

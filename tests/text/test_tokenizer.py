"""The Tokenizer behaves like transformers' AutoTokenizer with the same files."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton_text.artifacts import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ArtifactError,
    byte_artifacts,
)
from baton_text.detokenizer import Detokenizer
from baton_text.tokenizer import LONG_TEXT, Tokenizer
from tests.support.engines.text_models import (
    byte_level_artifacts,
    metaspace_artifacts,
    write_artifacts,
)

Ours = Callable[[Path], Tokenizer]

TEXTS = [
    "",
    "Hello",
    " Hello  world ",
    "The quick brown fox\n\n1. 22 333\n\tdef f(x):\n        return {'a': [1]}\n",
    "<s>system</s> <|user|>hi<|im_end|><|im_start|>x",
    "Gr\u00fc\u00dfe \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f4bb e\u0301 \x00\x7f \u2581",
    "isn't it , no . \u00a0 \u3000 end ?",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_those_of_transformers(
    model_folder: Path, our_tokenizer: Ours, hugging_face: Callable[[Path], Any], text: str
) -> None:
    ours, theirs = our_tokenizer(model_folder), hugging_face(model_folder)
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs(text, add_special_tokens=special)["input_ids"]
        for skip in (True, False):
            decoded = ours.decode(ids, skip_special_tokens=skip)
            assert decoded == theirs.decode(ids, skip_special_tokens=skip)
            detokenizer = Detokenizer(ours, skip_special=skip)
            assert detokenizer.push(ids).text + detokenizer.finish() == decoded


def test_a_long_text_has_the_ids_that_transformers_gives(
    model_folder: Path, our_tokenizer: Ours, hugging_face: Callable[[Path], Any]
) -> None:
    ours = our_tokenizer(model_folder)
    text = "".join(TEXTS) * (LONG_TEXT // len("".join(TEXTS)) + 1)
    for special in (True, False):
        theirs = hugging_face(model_folder)(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == theirs


@pytest.mark.parametrize("most", [1, 7, 100, 100_000])
def test_the_last_ids_of_a_text_are_those_that_transformers_keeps_on_the_left(
    model_folder: Path,
    our_tokenizer: Ours,
    hugging_face: Callable[[Path], Any],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = our_tokenizer(model_folder), hugging_face(model_folder)
    monkeypatch.setattr(theirs, "truncation_side", "left")
    for text in (*TEXTS, "".join(TEXTS) * 9):
        kept = theirs(text, add_special_tokens=False, truncation=True, max_length=most)
        assert ours.encode_last(text, most, add_special_tokens=False) == kept["input_ids"]
        assert ours.encode_last(text, most) == ours.encode(text)[-most:]


def test_a_long_text_is_encoded_while_other_threads_run() -> None:
    tokenizer = Tokenizer.from_artifacts(byte_level_artifacts())
    text = "a quick brown fox " * 50_000

    def turns_of_another_thread() -> int:
        """While the text is encoded once."""
        began, turns = threading.Event(), 0

        def encode() -> None:
            began.set()
            tokenizer.encode_up_to(text, len(text))

        encoding = threading.Thread(target=encode)
        encoding.start()
        began.wait()
        while encoding.is_alive():
            time.sleep(0.001)
            turns += 1
        return turns

    # One or two, each time, where the library keeps the interpreter to itself. A busy machine may
    # give another thread as few now and then.
    assert any(turns_of_another_thread() > 4 for _ in range(30))


def test_vocabulary_eos_and_special_tokens_equal_those_of_transformers(
    model_folder: Path, our_tokenizer: Ours, hugging_face: Callable[[Path], Any]
) -> None:
    ours, theirs = our_tokenizer(model_folder), hugging_face(model_folder)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.special_ids == {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }


def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(artifacts: dict[str, bytes]) -> None:
    tokenizer = Tokenizer.from_artifacts(artifacts)
    text = "the quick \u65e5\u672c \U0001f600 fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text


def test_a_token_in_mid_text_keeps_its_space_and_half_a_character_shows_as_unknown() -> None:
    tokenizer = Tokenizer.from_artifacts(metaspace_artifacts())
    the, quick = tokenizer.encode("the quick")
    assert [tokenizer.token_text(the), tokenizer.token_text(quick)] == [" the", " quick"]
    assert tokenizer.token_text(3 + 0xE2) == "\ufffd"
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.token_text(-1) == ""


def test_the_ids_of_the_byte_tokenizer_are_bytes() -> None:
    tokenizer = Tokenizer.from_artifacts(byte_artifacts())
    assert tokenizer.encode("az\u00fc") == list("az\u00fc".encode())
    assert [tokenizer.token_bytes(index) for index in range(256)] == [
        bytes([index]) for index in range(256)
    ]
    assert tokenizer.eos_ids == (257,)


def test_eos_ids_come_from_generation_config_then_config_then_tokenizer_config() -> None:
    artifacts = byte_level_artifacts()
    artifacts[GENERATION_CONFIG] = json.dumps({"eos_token_id": [7, 3, 7]}).encode()
    artifacts[CONFIG] = json.dumps({"eos_token_id": 9}).encode()
    assert Tokenizer.from_artifacts(artifacts).eos_ids == (7, 3)
    del artifacts[GENERATION_CONFIG]
    assert Tokenizer.from_artifacts(artifacts).eos_ids == (9,)
    del artifacts[CONFIG]
    assert Tokenizer.from_artifacts(artifacts).eos_ids == (1,)
    del artifacts[TOKENIZER_CONFIG]
    assert Tokenizer.from_artifacts(artifacts).eos_ids == ()


@pytest.mark.parametrize(
    "change",
    [
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"extra_special_tokens": ["<|tool|>", "<|user|>"]},
        {"pad_token": "<pad>", "unk_token": {"content": "<|user|>", "__type": "AddedToken"}},
        {"added_tokens_decoder": {"400": {"content": "<think>", "special": False}}},
    ],
    ids=lambda change: ",".join(change),
)
def test_settings_only_in_tokenizer_config_apply_as_in_transformers(
    tmp_path: Path, hugging_face: Callable[[Path], Any], change: dict[str, Any]
) -> None:
    artifacts = byte_level_artifacts()
    config = {**json.loads(artifacts[TOKENIZER_CONFIG]), **change}
    artifacts[TOKENIZER_CONFIG] = json.dumps(config).encode()
    ours = Tokenizer.from_artifacts(artifacts)
    theirs = hugging_face(write_artifacts(artifacts, tmp_path))
    text = "<|user|>a<pad>b<|tool|>c<think>d"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_truncation_and_padding_in_the_file_do_not_affect_prompts() -> None:
    artifacts = byte_level_artifacts()
    raw = json.loads(artifacts[TOKENIZER])
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    artifacts[TOKENIZER] = json.dumps(raw).encode()
    tokenizer = Tokenizer.from_artifacts(artifacts)
    assert tokenizer.decode(tokenizer.encode("a b c d e f")) == "a b c d e f"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "tokenizer.json is missing"),
        (b"{", "tokenizer.json cannot be read"),
        (b"\xff\xfe", "tokenizer.json cannot be read"),
        (b"[]", "tokenizer.json cannot be read"),
    ],
)
def test_the_error_names_an_invalid_tokenizer_file(data: bytes | None, message: str) -> None:
    artifacts = {} if data is None else {TOKENIZER: data}
    with pytest.raises(ArtifactError, match=message):
        Tokenizer.from_artifacts(artifacts)


ODD: tuple[Any, ...] = (True, 1, 1e308, math.nan, "other", ["other"], [None], {"other": 1})


@pytest.mark.parametrize(
    ("file", "config", "odd"),
    [
        (TOKENIZER_CONFIG, lambda odd: {"added_tokens_decoder": odd}, ODD),
        (TOKENIZER_CONFIG, lambda odd: {"added_tokens_decoder": {"400": odd}}, (None, *ODD)),
        (
            TOKENIZER_CONFIG,
            lambda odd: {"added_tokens_decoder": {"400": {"content": odd}}},
            (None, *(each for each in ODD if each != "other")),
        ),
        (TOKENIZER_CONFIG, lambda odd: {"extra_special_tokens": odd}, ODD[:5]),
        (TOKENIZER_CONFIG, lambda odd: {"additional_special_tokens": odd}, ODD[:5]),
        (GENERATION_CONFIG, lambda odd: {"eos_token_id": odd}, (-1, *(o for o in ODD if o != 1))),
    ],
)
def test_a_field_of_a_wrong_type_is_named_in_the_error(
    file: str, config: Callable[[Any], dict[str, Any]], odd: Sequence[Any]
) -> None:
    for value in odd:
        artifacts = byte_level_artifacts()
        artifacts[file] = json.dumps(config(value)).encode()
        [name] = config(value)
        with pytest.raises(ArtifactError, match=f"^{file}: {name} ") as error:
            Tokenizer.from_artifacts(artifacts)
        assert "\n" not in str(error.value)


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    artifacts = byte_level_artifacts()
    raw = json.loads(artifacts[TOKENIZER])
    raw["decoder"] = {"type": "CTC", "pad_token": "-", "word_delimiter_token": "|", "cleanup": True}
    artifacts[TOKENIZER] = json.dumps(raw).encode()
    with pytest.raises(ArtifactError, match="CTC"):
        Tokenizer.from_artifacts(artifacts)


def test_a_tokenizer_without_decoder_joins_words_by_spaces() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"<unk>": 0, "hello": 1, "you": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer.from_artifacts({TOKENIZER: backend.to_str().encode()})
    ids = tokenizer.encode("hello you there")
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([index]).text for index in ids) == tokenizer.decode(ids)

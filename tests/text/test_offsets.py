"""Token offsets are inside the text, in order, and at the characters of the token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, processors

from baton_text.artifacts import TOKENIZER, read_artifacts
from baton_text.detokenizer import TextReader, context_of
from baton_text.offsets import TextOffsets, offsets_in
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import FAMILIES, LOSSLESS, byte_level_artifacts, tokenizer_of

every_tokenizer = pytest.mark.parametrize("tokenizer", FAMILIES, indirect=True)
lossless = pytest.mark.parametrize("name", LOSSLESS)
BYTES = tokenizer_of("bytes")
EURO = [*"€".encode()]

WORDS = st.sampled_from(["stop", " the", "\n", "  ", "a", "日本", "ü", "e\u0301", "😀", "</s>"])
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=8).map("".join)


@cache  # hypothesis looks through a strategy when it is new
def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of texts, and arbitrary ids: parts of characters, special tokens, unknown ids."""
    senseless = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12)
    sensible = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return st.lists(senseless | sensible, max_size=4).map(
        lambda parts: [token_id for part in parts for token_id in part]
    )


def check(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """Compare the offsets of `ids` with the text that is decoded from the same ids."""
    reader = TextReader(tokenizer, skip)
    text = reader.read(ids) + reader.finish()
    offsets = TextOffsets(tokenizer, skip)
    found = [offsets.push(token_id) for token_id in ids]
    assert found == sorted(found)
    first = True
    for place, token_id in zip(found, ids, strict=True):
        assert 0 <= place <= len(text)
        piece = tokenizer.piece(token_id, first=first, skip_special=skip)
        if piece is None:
            continue
        first = False
        at = text[place:]
        try:
            own = piece.decode()
        except UnicodeDecodeError:
            # A part of a character begins where that does, or is not UTF-8 and stands for itself.
            assert at[0] == "\ufffd" or piece[:1] in at[0].encode()
            continue
        strip = tokenizer.spelling.strip_char
        assert at.startswith(own) or (strip and place == 0 and at.startswith(own.lstrip(strip)))


@every_tokenizer
@settings(max_examples=70)
@given(data=st.data())
def test_a_tokens_text_begins_at_its_place(tokenizer: Tokenizer, data: st.DataObject) -> None:
    check(tokenizer, data.draw(any_ids(tokenizer)), data.draw(st.booleans()))


def test_a_tokens_text_begins_at_its_place_with_the_demo_model_too(demo_model: Path) -> None:
    demo = Tokenizer.from_artifacts(read_artifacts(demo_model))

    @settings(max_examples=70)
    @given(ids=any_ids(demo), skip=st.booleans())
    def holds(ids: list[int], skip: bool) -> None:
        check(demo, ids, skip)

    holds()


@every_tokenizer
@settings(max_examples=50)
@given(data=st.data())
def test_offsets_after_a_context_equal_those_after_all_earlier_ids(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids, skip = data.draw(any_ids(tokenizer)), data.draw(st.booleans())
    middle = data.draw(st.integers(0, len(ids)))
    whole = TextOffsets(tokenizer, skip)
    found = [whole.push(token_id) for token_id in ids]
    context = context_of(tokenizer, ids[:middle], skip)
    begun = len(TextReader(tokenizer, skip).read(ids[:middle]))
    rest = TextOffsets(tokenizer, skip, context=context, before=begun)
    assert [rest.push(token_id) for token_id in ids[middle:]] == found[middle:]
    assert rest.length == whole.length


def offsets(ids: list[int], *, skip: bool = True) -> list[int]:
    placed = TextOffsets(BYTES, skip)
    return [placed.push(token_id) for token_id in ids]


def test_all_tokens_of_a_character_share_its_place() -> None:
    assert offsets([97, *EURO, 98]) == [0, 1, 1, 1, 2]


def test_a_token_that_interrupts_a_character_starts_after_it() -> None:
    assert offsets([*EURO[:2], 98, 99]) == [0, 0, 1, 2]
    assert offsets([*EURO[:2], *EURO]) == [0, 0, 1, 1, 1]
    assert offsets([0xE0, 0x80, 98]) == [0, 1, 2]  # 0x80 never follows 0xE0


def test_a_token_starts_after_all_invalid_bytes_that_are_shown_one_by_one() -> None:
    tokenizer = tokenizer_of("metaspace")
    ids = [3 + 0xE2, 3 + 0x82, 3 + ord("b")]  # <unk>, <s> and </s> come before the bytes
    reader = TextReader(tokenizer)
    assert reader.read(ids) == "\ufffd\ufffdb"
    placed = TextOffsets(tokenizer)
    assert [placed.push(token_id) for token_id in ids] == [0, 0, 2]


def test_a_hidden_token_has_the_offset_of_the_next_token() -> None:
    special = min(BYTES.special_ids)
    shown = len(BYTES.token_text(special))
    assert offsets([97, special, 98]) == [0, 1, 1]
    assert offsets([97, special, 98], skip=False) == [0, 1, 1 + shown]
    assert offsets([*EURO[:1], special, *EURO[1:], 98]) == [0, 0, 0, 0, 1]


@every_tokenizer
@settings(max_examples=50)
@given(text=TEXTS, special=st.booleans())
def test_the_tokens_of_a_given_text_stand_in_it_in_order(
    tokenizer: Tokenizer, text: str, special: bool
) -> None:
    ids = tokenizer.encode(text, special)
    found = offsets_in(tokenizer, text, ids, special)
    assert len(found) == len(ids)
    assert found == sorted(found)
    assert all(0 <= place <= len(text) for place in found)


@lossless
@settings(max_examples=50)
@given(text=TEXTS)
def test_the_tokens_of_a_given_text_begin_at_their_characters(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for place, token_id in zip(offsets_in(tokenizer, text, ids, False), ids, strict=True):
        own = tokenizer.token_text(token_id)
        if "\ufffd" not in own:
            assert text[place:].startswith((own, own.lstrip(" ")))


def changed_byte_level(*, trimmed: bool) -> Tokenizer:
    """Text is normalized, and a BOS and an EOS are put around it. `trimmed`: the library says that
    a token begins behind its space."""
    artifacts = byte_level_artifacts()
    backend = Backend.from_buffer(artifacts[TOKENIZER])
    backend.normalizer = normalizers.NFC()
    around = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    trim = processors.ByteLevel(trim_offsets=trimmed)
    backend.post_processor = processors.Sequence([trim, around])
    return Tokenizer.from_artifacts(artifacts | {TOKENIZER: backend.to_str().encode()})


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("text", ["ab the end", "e\u0301 the end", "日 e\u0301e\u0301 the"])
def test_a_text_that_its_tokens_do_not_spell_is_divided_among_them_all_the_same(
    trimmed: bool, text: str
) -> None:
    tokenizer = changed_byte_level(trimmed=trimmed)
    ids = tokenizer.encode(text)
    found = offsets_in(tokenizer, text, ids, True)
    assert (found[0], found[1], found[-1]) == (0, 0, len(text))  # BOS, the first own one, EOS
    the = next(i for i, token_id in enumerate(ids) if tokenizer.token_text(token_id)[:2] == " t")
    assert found[the] == text.index(" the")
    assert found == sorted(found)


def test_words_that_a_tokenizer_writes_otherwise_begin_where_the_client_wrote_them() -> None:
    tokenizer = tokenizer_of("wordpiece")
    text = "the  quick ,fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = dict(zip(offsets_in(tokenizer, text, ids, False), ids, strict=True))
    assert tokenizer.token_text(found[0]).strip() == "the"
    assert {3, text.index(",") - 1, text.index("fox")} <= set(found)

"""E(ids, stop) has only whole characters, is never retracted, and ignores how ids are batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_text.artifacts import byte_artifacts
from baton_text.detokenizer import (
    Detokenizer,
    Emitted,
    StopMatcher,
    TextSettings,
    context_of,
)
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import FAMILIES, LOSSLESS, tokenizer_of
from tests.text.emitted_text import emitted

BYTES = tokenizer_of("bytes")
METASPACE = tokenizer_of("metaspace")
every_tokenizer = pytest.mark.parametrize("tokenizer", FAMILIES, indirect=True)

EMOJI = "\U0001f469\u200d\U0001f4bb \U0001f600"
WORDS = st.sampled_from(
    ["stop", "STOP", " the", " end", "\n", "  ", "a", "aa", "\u65e5\u672c", "\u00fc", EMOJI, "</s>"]
)
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=8).map("".join)
STOPS = st.lists(
    st.sampled_from(["stop", "op", "STOP th", "a", "aa", "aab", "\n\n", "\u672c", "\ufffd", " "])
    | st.text(min_size=1, max_size=5),
    max_size=3,
).map(tuple)


@cache  # hypothesis looks through a strategy when it is new
def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of texts, and arbitrary ids: parts of characters, special tokens, unknown ids."""
    senseless = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12)
    sensible = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return st.lists(senseless | sensible, max_size=4).map(
        lambda parts: [token_id for part in parts for token_id in part]
    )


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(detokenizer: Detokenizer, parts: Sequence[Sequence[int]]) -> Emitted:
    """Push all parts and finish; return the joined result."""
    texts, used = [], 0
    for part in parts:
        got = detokenizer.push(part)
        texts.append(got.text)
        used += got.used_ids
    return Emitted("".join(texts), detokenizer.stopped, used)


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The text cut at the stop string that ends first (the longest of those), and that string."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@every_tokenizer
@settings(max_examples=40)
@given(data=st.data())
def test_any_split_of_the_ids_gives_the_same_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(any_ids(tokenizer))
    stop, include = data.draw(STOPS), data.draw(st.booleans())
    skip, min_ids = data.draw(st.booleans()), data.draw(st.integers(0, 6))
    wanted = TextSettings(stop, include, skip, min_ids)
    parts = split(ids, data.draw(st.lists(st.integers(0, 99), max_size=5)))

    detokenizer = Detokenizer(tokenizer, stop, include, skip, min_ids=min_ids)
    assert stream(detokenizer, parts) == emitted(tokenizer, ids, wanted)

    detokenizer = Detokenizer(tokenizer, stop, include, skip, min_ids=min_ids)
    shown = stream(detokenizer, parts).text + detokenizer.finish()
    whole = emitted(tokenizer, ids, wanted, finished=True)
    assert (shown, detokenizer.stopped) == (whole.text, whole.stop)


@every_tokenizer
@settings(max_examples=40)
@given(data=st.data())
def test_a_takeover_in_the_middle_sends_exactly_the_rest(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(any_ids(tokenizer))
    stop, min_ids = data.draw(STOPS), data.draw(st.integers(0, 6))
    middle = data.draw(st.integers(0, len(ids)))
    wanted = TextSettings(stop, min_ids=min_ids)
    before = emitted(tokenizer, ids[:middle], wanted).text
    after = Detokenizer(tokenizer, stop, known=ids[:middle], min_ids=min_ids)
    rest = after.push(ids[middle:]).text
    assert before + rest == emitted(tokenizer, ids, wanted).text
    assert before + rest + after.finish() == emitted(tokenizer, ids, wanted, finished=True).text


@every_tokenizer
@settings(max_examples=50)
@given(data=st.data())
def test_an_answer_behind_its_prompts_context_is_decoded_as_behind_the_whole_prompt(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    prompt, ids = data.draw(any_ids(tokenizer)), data.draw(any_ids(tokenizer))
    stop, skip = data.draw(STOPS), data.draw(st.booleans())
    middle = data.draw(st.integers(0, len(ids)))
    wanted = TextSettings(stop, skip_special=skip)
    context = context_of(tokenizer, prompt, skip)
    assert len(context) <= 5
    before = emitted(tokenizer, ids[:middle], wanted, context=prompt).text
    after = Detokenizer(tokenizer, stop, skip_special=skip, known=ids[:middle], context=context)
    rest = after.push(ids[middle:]).text + after.finish()
    whole = emitted(tokenizer, ids, wanted, context=prompt, finished=True)
    assert (before + rest, after.stopped) == (whole.text, whole.stop)


@every_tokenizer
@settings(max_examples=50)
@given(data=st.data())
def test_prompt_and_answer_together_are_the_text_of_all_ids(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    words = st.sampled_from([" the", " quick", "the", "stop", "here", ", or", ".", "\n"])
    texts = st.lists(words, min_size=1, max_size=6).map("".join)
    prompt, ids = (tokenizer.encode(data.draw(texts), add_special_tokens=False) for _ in range(2))
    detokenizer = Detokenizer(tokenizer, context=context_of(tokenizer, prompt, True))
    answer = detokenizer.push(ids).text + detokenizer.finish()
    assert tokenizer.decode(prompt) + answer == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize(
    ("family", "alone", "continued"),
    [
        ("bytes", " brown", " brown"),
        ("byte-level", " brown", " brown"),
        ("metaspace", "brown", " brown"),
        ("metaspace-decoder", "brown", " brown"),
        ("unigram", "brown", " brown"),
        ("wordpiece", "brown", " brown"),
    ],
)
def test_an_answer_keeps_the_space_between_it_and_its_prompt(
    family: str, alone: str, continued: str
) -> None:
    tokenizer = tokenizer_of(family)
    prompt = tokenizer.encode("the quick", add_special_tokens=False)
    ids = tokenizer.encode("the quick brown", add_special_tokens=False)[len(prompt) :]
    assert Detokenizer(tokenizer).push(ids).text == alone
    context = context_of(tokenizer, prompt, True)
    assert Detokenizer(tokenizer, context=context).push(ids).text == continued


@pytest.mark.parametrize("tokenizer", ["bytes", "byte-level", "metaspace"], indirect=True)
def test_an_answer_completes_the_character_that_its_prompt_began(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U0001f680", add_special_tokens=False)
    for cut in range(len(ids) - 3, len(ids)):
        context = context_of(tokenizer, ids[:cut], True)
        assert Detokenizer(tokenizer, context=context).push(ids[cut:]).text == "\U0001f680"


def test_stop_strings_do_not_match_in_the_context() -> None:
    context = context_of(BYTES, BYTES.encode("the E"), True)
    detokenizer = Detokenizer(BYTES, stop=("END",), context=context)
    assert detokenizer.push(BYTES.encode("NDs")) == Emitted("NDs", None, 3)


@every_tokenizer
@settings(max_examples=40)
@given(data=st.data())
def test_shown_text_is_never_retracted(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids, stop = data.draw(any_ids(tokenizer)), data.draw(STOPS)
    wanted = TextSettings(stop, include_stop=data.draw(st.booleans()))
    whole = emitted(tokenizer, ids, wanted, finished=True).text
    for length in range(len(ids) + 1):
        assert whole.startswith(emitted(tokenizer, ids[:length], wanted).text)


@every_tokenizer
@settings(max_examples=40)
@given(data=st.data())
def test_a_stop_string_cuts_the_whole_text_where_it_first_ends(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids, stop, include = data.draw(any_ids(tokenizer)), data.draw(STOPS), data.draw(st.booleans())
    plain = Detokenizer(tokenizer)
    text = plain.push(ids).text + plain.finish()
    detokenizer = Detokenizer(tokenizer, stop, include)
    shown = detokenizer.push(ids).text + detokenizer.finish()
    assert (shown, detokenizer.stopped) == reference(text, stop, include)


@pytest.mark.parametrize("tokenizer", ["bytes", "byte-level"], indirect=True)
@settings(max_examples=80)
@given(data=st.data())
def test_byte_level_text_is_what_the_library_decodes_even_for_invalid_bytes(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids, skip = data.draw(any_ids(tokenizer)), data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special=skip)
    shown = "".join(detokenizer.push([token_id]).text for token_id in ids) + detokenizer.finish()
    assert shown == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", ["metaspace", "metaspace-decoder"], indirect=True)
@settings(max_examples=80)
@given(texts=st.lists(TEXTS, max_size=4), specials=st.lists(st.integers(0, 4)), skip=st.booleans())
def test_metaspace_text_is_what_the_library_decodes_for_any_valid_text(
    tokenizer: Tokenizer, texts: list[str], specials: list[int], skip: bool
) -> None:
    # Texts encoded apart and joined: leading spaces in the middle, specials in between.
    ids = list(specials)[:2]
    for text in texts:
        ids += [2, *tokenizer.encode(text, add_special_tokens=False)]
    ids = [token_id for token_id in ids if not 3 <= token_id <= 4]  # the bytes 0 and 1
    detokenizer = Detokenizer(tokenizer, skip_special=skip)
    shown = "".join(detokenizer.push([token_id]).text for token_id in ids) + detokenizer.finish()
    assert shown == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", LOSSLESS)
def test_a_character_appears_with_its_last_byte(family: str) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode("\U0001f680", add_special_tokens=False)
    assert len(ids) >= 4
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push([token_id]).text for token_id in ids]
    assert "".join(shown[:-1]).strip() == ""
    assert shown[-1] == "\U0001f680"


def test_invalid_bytes_show_as_soon_as_they_cannot_become_a_character() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([0xF0, 0x9F]).text == ""
    assert detokenizer.push([ord("a")]).text == "\ufffda"
    assert detokenizer.push([0xFF]).text == "\ufffd"
    assert detokenizer.push([0xE2]).text == ""
    assert detokenizer.finish() == "\ufffd"


def test_byte_fallback_keeps_the_characters_before_a_bad_byte() -> None:
    euro, bad = [METASPACE.encode("\u20ac")[1:], [3 + 0xFF]]
    assert METASPACE.decode(euro + bad) == "\ufffd" * 4  # the library takes the character back
    detokenizer = Detokenizer(METASPACE)
    assert detokenizer.push(euro).text == "\u20ac"
    assert detokenizer.push(bad).text == "\ufffd"


def test_text_that_may_start_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(BYTES, stop=("END",))
    assert detokenizer.push(BYTES.encode("the E")).text == "the "
    assert detokenizer.push(BYTES.encode("N")).text == ""
    assert detokenizer.push(BYTES.encode("O")).text == "ENO"
    got = detokenizer.push(BYTES.encode("K ENDx"))
    assert got == Emitted("K ", "END", 5)
    assert detokenizer.push(BYTES.encode("more")) == Emitted("", "END", 0)
    assert detokenizer.finish() == ""


def test_include_stop_shows_the_stop_string_and_holds_nothing_back() -> None:
    detokenizer = Detokenizer(BYTES, stop=("END",), include_stop=True)
    assert detokenizer.push(BYTES.encode("the EN")).text == "the EN"
    assert detokenizer.push(BYTES.encode("Dx")) == Emitted("D", "END", 1)


def test_finish_returns_the_text_that_was_held_back() -> None:
    detokenizer = Detokenizer(BYTES, stop=("END",))
    assert detokenizer.push(BYTES.encode("the EN")).text == "the "
    assert detokenizer.finish() == "EN"
    assert detokenizer.stopped is None


def test_a_stop_string_is_found_where_it_begins_again_within_itself() -> None:
    detokenizer = Detokenizer(BYTES, stop=("aab",))
    assert detokenizer.push(BYTES.encode("aaab")) == Emitted("a", "aab", 4)


def test_a_stop_string_within_the_first_ids_does_not_count() -> None:
    detokenizer = Detokenizer(BYTES, stop=("aa",), min_ids=3)
    got = detokenizer.push(BYTES.encode("aaaab"))
    assert got == Emitted("aa", "aa", 4)  # the 4th a ends the first match that counts


def test_special_tokens_show_only_without_skip_special() -> None:
    ids = [ord("a"), 257, ord("b")]
    assert Detokenizer(BYTES).push(ids).text == "ab"
    assert Detokenizer(BYTES, skip_special=False).push(ids).text == "a<|eos|>b"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(BYTES, stop=("",))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [ord("a")] * n,
        lambda n: [0xFF] * n,  # never a character
        lambda n: [0xF0, 0x9F] * (n // 2),
    ],
    ids=["text", "invalid", "half characters"],
)
def test_each_id_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], list[int]]
) -> None:
    tokenizer = Tokenizer.from_artifacts(byte_artifacts())
    decoded = 0
    piece = tokenizer.piece
    whole: list[object] = []

    def counted(token_id: int, *, first: bool = False, skip_special: bool = False) -> bytes | None:
        nonlocal decoded
        decoded += 1
        return piece(token_id, first=first, skip_special=skip_special)

    monkeypatch.setattr(tokenizer, "piece", counted)
    monkeypatch.setattr(tokenizer, "decode", whole.append)
    ids = make(4000)
    detokenizer = Detokenizer(tokenizer, stop=("aab", "\ufffdx"), known=ids[:1000])
    for token_id in ids[1000:]:
        detokenizer.push([token_id])
    assert decoded == len(ids)
    assert whole == []


@pytest.mark.integration
def test_a_stop_string_costs_at_most_two_comparisons_per_character() -> None:
    class Counting(str):
        """A stop string that counts the reads of its characters."""

        looked = 0

        def __getitem__(self, key: object) -> str:
            type(self).looked += 1
            return super().__getitem__(key)  # type: ignore[index]

    stop = Counting("a" * 500 + "b")  # the worst case for a naive search
    matcher = StopMatcher(stop)
    Counting.looked = 0
    for _ in range(4):
        for char in "a" * 500 + "c":
            assert not matcher.step(char)
    assert Counting.looked <= 2 * 2 * 4 * 501

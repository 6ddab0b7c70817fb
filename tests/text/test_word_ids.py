"""Words whose ids are remembered give the ids that the library gives for the whole text."""

from __future__ import annotations

import threading

import pytest
from tokenizers import Tokenizer as Backend

from baton_text import word_ids
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import byte_level_artifacts
from tests.text.test_division import DIVIDED, library_of, texts

LONG_WORD = "x" * (word_ids.LONGEST_WORD + 1)


@pytest.mark.parametrize("name", DIVIDED)
def test_new_and_known_words_have_the_ids_of_the_whole_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_ids, "MOST_WORDS", 200)  # so that words are forgotten, too
    tokenizer = Tokenizer.from_artifacts(DIVIDED[name]())
    library = library_of(tokenizer)
    for text in (*texts(3), "", " ", "a ", f"a {LONG_WORD} b", f"{LONG_WORD} b", LONG_WORD):
        for special in (True, False):
            whole = library.encode(text, add_special_tokens=special).ids
            for time in ("first", "second"):
                assert tokenizer.encode(text, special) == whole, (text, time)


def test_a_known_text_is_encoded_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_artifacts(byte_level_artifacts())
    ids = tokenizer.encode("the quick brown the")

    class NoLibrary:
        pass

    monkeypatch.setattr(tokenizer._words, "_backend", NoLibrary())
    assert tokenizer.encode("the quick brown the") == ids
    assert tokenizer.encode("the brown") == [ids[0], *tokenizer.encode(" brown")]
    with pytest.raises(AttributeError):
        tokenizer.encode("the unknown")


def test_threads_share_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread forgets words that the others look up."""
    monkeypatch.setattr(word_ids, "MOST_WORDS", 20)
    tokenizer = Tokenizer.from_artifacts(byte_level_artifacts())
    library: Backend = library_of(tokenizer)
    made = texts(4)[:50]
    whole = [library.encode(text).ids for text in made]
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(made, whole, strict=True):
            if tokenizer.encode(text) != ids:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

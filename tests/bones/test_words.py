"""The checker of retired words finds each kind of them, and no others."""

from __future__ import annotations

import pytest

from tests.support.project.words import NAMES, PHRASES, findings

CODE = '''
class ToldNode:
    """A node that
    is told to drain."""

    def test_the_second_request_begins_anew(self) -> None:
        self._story = 1  # so
        # many
'''


def test_names_phrases_and_test_names_are_found_with_their_lines() -> None:
    found = {(one.line, one.words) for one in findings("planted.py", CODE)}
    assert found == {
        (2, "ToldNode"),
        (4, "is told"),
        (6, "test_the_second_request_begins_anew"),
        (7, "_story"),
        (7, "so # many"),
    }


def test_a_class_with_a_retired_name_is_found() -> None:
    [found] = findings("planted.py", "class _Prices:\n    pass\n")
    assert (found.line, found.words) == (1, "class _Prices")


@pytest.mark.parametrize("file", ["page.md", "values.yaml"])
def test_phrases_are_found_in_text_that_is_no_code(file: str) -> None:
    [found] = findings(file, "The planner\ngoes by the newest report.")
    assert str(found) == f"{file}:2: 'goes by': write {PHRASES['go(?:es)? by']}"


@pytest.mark.parametrize("word", NAMES)
def test_a_word_that_is_retired_for_names_is_fine_in_prose(word: str) -> None:
    assert list(findings("page.md", f"A {word} of it.")) == []


@pytest.mark.parametrize(
    "text", ["as long as", "so long as it lasts", "so much that it fails", "retold", "anew2"]
)
def test_longer_words_and_standard_phrases_are_fine(text: str) -> None:
    assert list(findings("page.md", text)) == []

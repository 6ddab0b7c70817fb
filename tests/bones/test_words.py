"""The checker of phrases finds them in text, in code and in long names, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.project.words import PHRASES, findings

CODE = '''
class Node:
    """A node that
    is told to drain."""

    def test_the_second_request_begins_anew(self) -> None:
        self._told = 1  # so
        # many
'''


def test_phrases_of_texts_and_of_test_names_are_found_with_their_lines() -> None:
    assert {(line, words) for _, line, words, _ in findings("planted.py", CODE)} == {
        (4, "is told"),
        (6, "test_the_second_request_begins_anew"),
        (7, "so # many"),
    }


@pytest.mark.parametrize("file", ["page.md", "values.yaml"])
def test_phrases_are_found_in_text_that_is_no_code(file: str) -> None:
    [finding] = findings(file, "The planner\ngoes by the newest report.")
    assert str(finding) == f"{file}:2: 'goes by': write {PHRASES['go(?:es)? by']}"


@pytest.mark.parametrize(
    "text", ["as long as", "so long as it lasts", "so much that it fails", "retold", "anew2"]
)
def test_longer_words_and_standard_phrases_are_fine(text: str) -> None:
    assert list(findings("page.md", text)) == []

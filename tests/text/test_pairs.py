"""Two texts as one prompt: joined by the tokenizer, or rendered by a template made for pairs."""

from __future__ import annotations

from typing import Any

import pytest

from baton_text.artifacts import CHAT_TEMPLATE
from baton_text.chat import ChatTemplate
from baton_text.pairs import encode_pair
from baton_text.tokenizer import Tokenizer
from tests.support.engines.special_tokens import (
    BERT_TYPES,
    PLAIN_TYPES,
    enclosed_artifacts,
)

TEMPLATE = (
    "{% for m in messages %}{{ {'query': 'Q', 'document': 'D'}[m.role] }}{{ m.content }}"
    "{% endfor %}"
)
ONE_ROLE = "{% for m in messages %}{% if m.role == 'query' %}{{ m.content }}{% endif %}{% endfor %}"


def artifacts(types: tuple[int, ...] = PLAIN_TYPES, template: str = "") -> dict[str, bytes]:
    files = enclosed_artifacts(types=types)
    return files | ({CHAT_TEMPLATE: template.encode()} if template else {})


def encoded(files: dict[str, bytes]) -> tuple[bytes, int]:
    template, tokenizer = ChatTemplate.from_artifacts(files), Tokenizer.from_artifacts(files)
    ids, place = encode_pair(template, tokenizer, "one", "two")
    return bytes(ids), place


@pytest.mark.parametrize(
    ("files", "text", "place"),
    [
        (artifacts(), b"<one|two>", 0),
        (artifacts(BERT_TYPES), b"<one|two>", 5),
        (artifacts((0, 0, 1, 1, 1)), b"<one|two>", 0),
        (artifacts(BERT_TYPES, ONE_ROLE), b"<one|two>", 5),
        (artifacts(BERT_TYPES, TEMPLATE), b"<QoneDtwo>", 0),
    ],
)
def test_a_pair_is_one_prompt_that_says_where_its_second_text_begins(
    files: dict[str, bytes], text: bytes, place: int
) -> None:
    assert encoded(files) == (text, place)


def test_a_pair_may_be_joined_without_special_tokens() -> None:
    tokenizer = Tokenizer.from_artifacts(artifacts(BERT_TYPES))
    first, second = ([*text] for text in (b"one", b"two"))
    joined: Any = tokenizer.join_pair(first, second, add_special_tokens=False)
    assert joined == ([*b"onetwo"], 3)

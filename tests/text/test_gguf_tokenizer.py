"""Tokenizers of GGUF files split and merge texts as the models' own do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from baton_text.artifacts import read_artifacts
from baton_text.gguf.pretokens import PRETOKENS
from baton_text.tokenizer import Tokenizer
from tests.support.engines.gguf_bytes import METADATA, File

SPACE = "\u2581"
TEXTS = (
    "Hello, world! It's 12345 o'clock\n\n  and\tTHEN   some\r\n more... ",
    "caf\u00e9 cafe\u0301 na\u00efve \u4f60\u597d\u4e16\u754c \U0001f600 x\u00b2 \u0661\u0662 aB",
    "def f(x):\n    return x ** 2  # 100%\n\n\n",
    "  1.  2,000/3\n",
)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("gpt-2", "I'm 12\n\n1.", ["I", "'m", "\u010012", "\u010a", "\u010a", "1", "."]),
        ("smollm", "at 12", ["at", "\u0100", "1", "2"]),
        (
            "llama-bpe",
            "I'm 1234\n\n1.",
            ["I", "'m", "\u0100", "123", "4", "\u010a\u010a", "1", "."],
        ),
        ("qwen2", "I'm 12\n\n1.", ["I", "'m", "\u0100", "1", "2", "\u010a\u010a", "1", "."]),
        ("tekken", "aB CdE/\n12", ["a", "B", "\u0100Cd", "E", "/\u010a", "1", "2"]),
    ],
)
def test_texts_are_split_by_the_name_of_the_file(
    name: str, text: str, parts: Sequence[str]
) -> None:
    shown = [part for part, _ in PRETOKENS[name].splitter().pre_tokenize_str(text)]
    assert [part.replace("\u0120", "\u0100") for part in shown] == parts


@pytest.mark.long  # imports transformers
def test_patterns_equal_those_of_transformers() -> None:
    import inspect

    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    patterns: Mapping[str, str] = {
        "llama-bpe": inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default,
        "qwen2": PRETOKENIZE_REGEX,
    }
    for name, pattern in patterns.items():
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        ours = PRETOKENS[name].pattern
        assert ours is not None
        for text in TEXTS:
            theirs = split.pre_tokenize_str(text)
            assert pre_tokenizers.Split(Regex(ours), "isolated").pre_tokenize_str(text) == theirs


def sentence_piece(path: Path, **more: Any) -> Tokenizer:
    """A tokenizer of pieces with scores, bytes and special tokens."""
    pieces = [
        *(SPACE, "a", "b", "n", "s", "ab", "an", "ana", "ban", "bana", "na", "nas"),
        *(f"{SPACE}b", f"{SPACE}ban", "anas"),
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        **METADATA,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }
    return Tokenizer.from_artifacts(read_artifacts(File(metadata=metadata).write(path)))


def merged_by_score(text: str, vocab: Mapping[str, int]) -> list[int]:
    """Join the neighbours that make the piece with the best score, which is the lowest id here,
    until none make a piece."""
    parts = list(text)
    while True:
        pairs = [(vocab.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts))]
        known = [(index, at) for index, at in pairs if index is not None]
        if not known:
            return [
                index
                for part in parts
                for index in ([vocab[part]] if part in vocab else [3 + b for b in part.encode()])
            ]
        _, at = min(known)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("text", ["banana bananas", "  ab nasab", "\u00e9a\nsan anas", "snab"])
@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_in_the_order_of_scores(text: str, prefix: bool, tmp_path: Path) -> None:
    more = {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = sentence_piece(tmp_path / "model.gguf", **more)
    spelled = (SPACE if prefix else "") + text.replace(" ", SPACE)
    vocab = tokenizer._backend.get_vocab()
    ids = tokenizer.encode(text)
    assert ids == [1, *merged_by_score(spelled, vocab)]
    assert tokenizer.decode(ids) == text


def test_control_tokens_are_found_in_a_text_and_not_shown(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path / "model.gguf")
    ids = tokenizer.encode("ban</s>", add_special_tokens=False)
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "ban"

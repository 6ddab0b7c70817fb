"""Artifacts of a byte tokenizer that encloses texts, as those of BERT do: <text>, <text|text>.

`types` are the token types of the five parts of a pair; those of BERT's tokenizer are BERT_TYPES.
"""

from __future__ import annotations

import json

from baton_text.artifacts import TOKENIZER, byte_artifacts

PLAIN_TYPES, BERT_TYPES = (0,) * 5, (0, 0, 0, 1, 1)


def enclosed_artifacts(
    vocab_size: int = 259, types: tuple[int, ...] = PLAIN_TYPES
) -> dict[str, bytes]:
    files = byte_artifacts(vocab_size)
    tokenizer = json.loads(files[TOKENIZER])
    pair = [_special("<"), _text("A"), _special("|"), _text("B"), _special(">")]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [_special("<"), _text("A"), _special(">")],
        "pair": [
            part | {name: values | {"type_id": type}}
            for part, type in zip(pair, types, strict=True)
            for name, values in part.items()
        ],
        "special_tokens": {
            sign: {"id": sign, "ids": [ord(sign)], "tokens": [sign]} for sign in "<|>"
        },
    }
    return files | {TOKENIZER: json.dumps(tokenizer).encode()}


def _special(sign: str) -> dict[str, dict[str, object]]:
    return {"SpecialToken": {"id": sign, "type_id": 0}}


def _text(name: str) -> dict[str, dict[str, object]]:
    return {"Sequence": {"id": name, "type_id": 0}}

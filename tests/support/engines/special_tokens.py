"""Artifacts of a byte tokenizer that encloses texts, as those of BERT do: <text>, <text|text>."""

from __future__ import annotations

import json

from baton_text.artifacts import TOKENIZER, byte_artifacts


def enclosed_artifacts(vocab_size: int = 259) -> dict[str, bytes]:
    files = byte_artifacts(vocab_size)
    tokenizer = json.loads(files[TOKENIZER])
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [_special("<"), _text("A"), _special(">")],
        "pair": [_special("<"), _text("A"), _special("|"), _text("B"), _special(">")],
        "special_tokens": {
            sign: {"id": sign, "ids": [ord(sign)], "tokens": [sign]} for sign in "<|>"
        },
    }
    return files | {TOKENIZER: json.dumps(tokenizer).encode()}


def _special(sign: str) -> dict[str, object]:
    return {"SpecialToken": {"id": sign, "type_id": 0}}


def _text(name: str) -> dict[str, object]:
    return {"Sequence": {"id": name, "type_id": 0}}

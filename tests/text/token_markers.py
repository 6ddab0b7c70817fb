"""A byte tokenizer in which the markers of models are tokens, special ones and others."""

from __future__ import annotations

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton_text.artifacts import TOKENIZER, byte_artifacts
from baton_text.tokenizer import Tokenizer

SPECIAL = (
    "<|im_start|>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[ARGS]", "</arg_value>")


def with_markers() -> Tokenizer:
    artifacts = byte_artifacts()
    backend = Backend.from_buffer(artifacts[TOKENIZER])
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False) for text in PLAIN])
    return Tokenizer.from_artifacts({**artifacts, TOKENIZER: backend.to_str().encode()})

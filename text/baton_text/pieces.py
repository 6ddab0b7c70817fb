"""Convert each token to its bytes, so that text can be decoded token by token.

In: the `decoder` of a tokenizer.json. Out: a `Spelling`. The pieces of a sequence, joined and
decoded as UTF-8, equal the text that the `tokenizers` library decodes for the whole sequence, and
no id is decoded twice. There is one deliberate difference. If consecutive byte-fallback tokens are
not valid UTF-8, the library replaces all of them by U+FFFD, including valid characters before the
fault. That would retract text already shown, so here only the faulty bytes become U+FFFD.

Decoders that no causal language model uses (CTC, BPEDecoder, ...) are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from baton_text.artifacts import ArtifactError
from baton_text.bytelevel import CHAR_TO_BYTE

# The `tokenizers` library's cleanup of one WordPiece token, in its order.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """How the tokens of one tokenizer become bytes.

    errors      codec error handler for bytes that are not UTF-8
    strip_char  character to strip from the start of the whole text
    strip_count maximum number of `strip_char` to strip
    """

    @property
    def errors(self) -> str: ...
    @property
    def strip_char(self) -> str: ...
    @property
    def strip_count(self) -> int: ...

    def piece(self, token: str, first: bool) -> bytes:
        """The bytes of `token`; `first`: no token precedes it."""
        ...


@dataclass(frozen=True)
class ByteLevel:
    """As in GPT-2 (also Llama 3, Qwen, SmolLM): each character of a token is one byte."""

    errors: str = "replace"
    strip_char: str = ""
    strip_count: int = 0

    def piece(self, token: str, first: bool) -> bytes:
        try:
            return bytes([CHAR_TO_BYTE[char] for char in token])
        except KeyError:  # an added token, written as plain text
            return token.encode()


@dataclass(frozen=True)
class SentencePiece:
    """Replacements such as a mark for a space, bytes as <0xE2> tokens, a leading space to drop.

    Each invalid byte shows as one U+FFFD: "surrogateescape" keeps the bytes separate, and
    TextReader replaces them.
    """

    errors: str = "surrogateescape"
    strip_char: str = ""
    strip_count: int = 0
    byte_fallback: bool = False
    drop_in_first: str = ""
    replacements: tuple[tuple[str, str], ...] = ()

    def piece(self, token: str, first: bool) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if first and self.drop_in_first:
            token = token.replace(self.drop_in_first, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


@dataclass(frozen=True)
class WordPiece:
    """As in BERT: `prefix` marks a token that continues a word; any other token starts one.

    `cleanup` drops the space before punctuation and English contractions.
    """

    errors: str = "replace"
    strip_char: str = ""
    strip_count: int = 0
    prefix: str = "##"
    cleanup: bool = True

    def piece(self, token: str, first: bool) -> bytes:
        if not first:
            continues = token.startswith(self.prefix)
            token = token.removeprefix(self.prefix) if continues else " " + token
        if self.cleanup:
            for old, new in _CLEANUP:
                token = token.replace(old, new)
        return token.encode()


@dataclass(frozen=True)
class Words:
    """For a tokenizer without decoder: spaces join the tokens."""

    errors: str = "replace"
    strip_char: str = ""
    strip_count: int = 0

    def piece(self, token: str, first: bool) -> bytes:
        return (token if first else " " + token).encode()


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling:
    """The spelling of a tokenizer.json's decoder; raises ArtifactError for an unsupported one."""
    if decoder is None:
        return Words()
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevel()
    if len(steps) == 1 and steps[0]["type"] == "WordPiece":
        return WordPiece(prefix=steps[0]["prefix"], cleanup=steps[0]["cleanup"])
    spelling = SentencePiece()
    fused = False
    for step in steps:
        fused = fused or step["type"] == "Fuse"
        spelling = _with_step(spelling, step, fused)
    return spelling


def _with_step(spelling: SentencePiece, step: Mapping[str, Any], fused: bool) -> SentencePiece:
    match step:
        case {"type": "Fuse"}:
            return spelling
        case {"type": "ByteFallback"} if not fused:
            return replace(spelling, byte_fallback=True)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
            return replace(spelling, replacements=(*spelling.replacements, (old, new)))
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme} if not fused:
            return replace(
                spelling,
                replacements=(*spelling.replacements, (mark, " ")),
                drop_in_first="" if scheme == "never" else mark,
            )
        case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0} if fused:
            return replace(spelling, strip_char=char, strip_count=count)
    raise ArtifactError(
        f"tokenizer.json's decoder step {dict(step)} is not supported; known are ByteLevel, "
        "WordPiece, Metaspace, ByteFallback, Replace of a string, Fuse, and Strip of the start "
        "after Fuse"
    )

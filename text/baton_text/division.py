"""Where a long text may be divided, so that its parts together have the ids of the whole.

In: a tokenizer's own parts. Out: a `Division`, or None where no place is certain; and how many
characters one token stands for at most.

A place is certain for the BPE models of two families. Whatever else a tokenizer has (a normalizer,
a pre-tokenizer, a pattern that is not known here), its texts are not divided.

    byte-level      The pre-tokenizer's pattern consists of known alternatives (`_ALTERNATIVES`).
                    None of them matches across a place where a space follows another character, or
                    where punctuation follows a letter or a digit; none looks behind; and the only
                    one that looks ahead ends with white space. So a match ends at that place, and
                    both sides are matched as in the whole.
    a mark for      The normalizer or pre-tokenizer writes U+2581 for a space. Where no token of the
    a space         vocabulary has the mark behind the character before it, no merge can cross the
                    place before a mark. Where the normalizer puts a mark before each text, the
                    space itself is left out: the mark stands for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

MARK = "\u2581"
BACKWARD = 4096  # characters before the end of a part in which its last place is looked for
# Letters whose class no version of Unicode changes: ASCII, kana, CJK, Hangul.
_LETTERS = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_PUNCTUATION = '\n.,;:!?()[]{}"/\\-_+=*<>@#$%^&|~`\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f'
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_START = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = f"(?i:{_CONTRACTIONS})?"
# What patterns are made of (GPT-2, Llama 3, Qwen, GPT-4o, Mistral's Tekken, DeepSeek). Each is
# checked by eye to be as the head of this module says: no letter, digit or sign before a space, no
# letter or digit before punctuation, in any of its matches.
_ALTERNATIVES = frozenset(
    (
        *_CONTRACTIONS.split("|"),
        f"(?i:{_CONTRACTIONS})",
        r" ?\p{L}+",
        r" ?\p{N}+",
        r" ?[^\s\p{L}\p{N}]+",
        r"\s+(?!\S)",
        r"\s+",
        rf"{_START}\p{{L}}+",
        rf"{_START}[\p{{L}}\p{{M}}]+",
        r"\p{N}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        *(f"{_START}[{_UPPER}]*[{_LOWER}]+{suffix}" for suffix in ("", _SUFFIX)),
        *(f"{_START}[{_UPPER}]+[{_LOWER}]*{suffix}" for suffix in ("", _SUFFIX)),
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
    )
)


@dataclass(frozen=True)
class Division:
    """`places` matches the two characters around a place; `drops_space`: the second of them is a
    space, which belongs to neither part."""

    places: re.Pattern[str]
    drops_space: bool = False

    def parts(self, text: str, size: int) -> Iterator[str]:
        """Parts of about `size` characters; longer ones where there is no place before."""
        start = 0
        while start < len(text):
            end = self._end(text, start, size)
            yield text[start:end]
            start = end + 1 if self.drops_space and end < len(text) else end

    def _end(self, text: str, start: int, size: int) -> int:
        wanted = start + size
        if wanted >= len(text):
            return len(text)
        last = None
        for last in self.places.finditer(text, max(start, wanted - BACKWARD), wanted):  # noqa: B007
            pass
        found = last or self.places.search(text, wanted - 1)
        return len(text) if found is None else found.start() + 1


def longest_token(backend: Backend) -> int:
    """Characters that one token stands for at most.

    It is certain where each character of a text becomes a token or a part of one, as in the
    families above: a byte-level token has at least as many characters as what it stands for. Other
    tokenizers may drop white space, or put a row of unknown characters into one token; a text that
    is so long with so few tokens is nobody's.
    """
    composed = 4 if {"NFC", "NFKC"} & {step["type"] for step in _steps(backend.normalizer)} else 1
    in_vocabulary = max(map(len, backend.get_vocab(with_added_tokens=False)), default=1)
    added = (len(token.content) for token in backend.get_added_tokens_decoder().values())
    return max(in_vocabulary * composed, *added, 1)


def division_of(backend: Backend) -> Division | None:
    """None for a tokenizer of whose texts no place is certain."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout is not None:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if any(
        token.lstrip or token.rstrip or re.search(rf"[\s{MARK}]", token.content)
        for token in backend.get_added_tokens_decoder().values()
    ):
        return None
    normalizers, steps = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    special = [token.content for token in backend.get_added_tokens_decoder().values()]
    if any(step["type"] == "ByteLevel" for step in steps):
        return _byte_level(normalizers, steps, special)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return _marked(normalizers, steps, special, vocabulary, model)


def _byte_level(
    normalizers: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    special: Sequence[str],
) -> Division | None:
    if not all(step["type"] in ("NFC", "NFD") for step in normalizers):
        return None
    if not all(map(_known, steps)) or not any(map(_separates_words, steps)):
        return None
    space = r"[^\s\x00-\x20] "
    if normalizers or any(step.get("add_prefix_space") for step in steps):
        return Division(re.compile(space))
    # No place is within a special token.
    signs = _escaped(set(_PUNCTUATION) - set("".join(special)))
    return Division(re.compile(rf"{space}|[{_LETTERS}0-9][{signs}]"))


def _known(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel" | "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
            return not step["invert"] and set(_alternatives(pattern)) <= _ALTERNATIVES
    return False


def _separates_words(step: Mapping[str, Any]) -> bool:
    """Without one that does, merges may cross any place."""
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    return step["type"] == "Split" and r"\s+" in _alternatives(step["pattern"]["Regex"])


def _marked(
    normalizers: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    special: Sequence[str],
    vocabulary: Mapping[str, int],
    model: models.BPE,
) -> Division | None:
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prepended = {"type": "Prepend", "prepend": MARK}
    if not all(step in (replaced, prepended) for step in normalizers):
        return None
    metaspaces = [step for step in steps if step["type"] == "Metaspace"]
    by_normalizer = replaced in normalizers
    if prepended in normalizers and metaspaces:
        return None
    if any(step["replacement"] != MARK for step in metaspaces):
        return None
    if not all(step in metaspaces or _idle(step) for step in steps):
        return None
    if by_normalizer == bool(metaspaces):
        return None
    if model.fuse_unk and not (
        model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    ):
        return None  # unknown characters in a row are one token, wherever the row begins
    before = {
        token[at - 1]
        for token in vocabulary
        for at in range(1, len(token))
        if token[at] == MARK != token[at - 1]
    }
    # Behind a special token a text begins anew, with a mark of its own.
    no_place = _escaped(before | {content[-1] for content in special if content})
    return Division(re.compile(rf"[^\W_{no_place}] (?=[^\W_])"), prepended in normalizers)


def _idle(step: Mapping[str, Any]) -> bool:
    """A split at spaces, of which the normalizer has left none (Gemma)."""
    return bool(step["type"] == "Split" and step["pattern"] == {"String": " "})


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as its JSON, without the sequences around its steps."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def _flat(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner = step.get("normalizers", step.get("pretokenizers"))
    if inner is None:
        yield step
        return
    for one in inner:
        yield from _flat(one)


def _alternatives(pattern: str) -> list[str]:
    """What stands between the bars that are in no bracket."""
    found, depth, in_class, at, begin = [], 0, False, 0, 0
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            at += 1
        elif in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == "|" and not depth:
            found.append(pattern[begin:at])
            begin = at + 1
        at += 1
    return [*found, pattern[begin:]]


def _escaped(characters: set[str]) -> str:
    """For use inside of a class."""
    return "".join(map(re.escape, sorted(characters)))

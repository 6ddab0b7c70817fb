"""Find places to divide a long text, so that the ids of its parts are the ids of the whole.

In: a tokenizer's configuration. Out: a `Division`, or None if no place is safe; and the maximum
number of characters per token.

Places are safe in the BPE models of two families. A text is not divided if its tokenizer has any
normalizer, pre-tokenizer or pattern that is not known here.

    byte-level      The pre-tokenizer's pattern consists of known alternatives (`_ALTERNATIVES`).
                    No alternative matches across a place where a space follows another character,
                    or where punctuation follows a letter or digit. None looks behind, and the only
                    one that looks ahead ends with white space. So a match ends at each such place,
                    and both sides match as in the whole text.
    a mark for      The normalizer or pre-tokenizer replaces a space by U+2581. If no token of the
    a space         vocabulary has a certain character directly before the mark, no merge crosses
                    the place between that character and a mark. If the normalizer puts a mark
                    before each text, the parts omit the space, which that mark replaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

MARK = "\u2581"
BACKWARD = 4096  # characters before the end of a part that are searched for its last place
# Letters with the same class in all versions of Unicode: ASCII, kana, CJK, Hangul.
_LETTERS = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_PUNCTUATION = '\n.,;:!?()[]{}"/\\-_+=*<>@#$%^&|~`\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f'
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_START = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = f"(?i:{_CONTRACTIONS})?"
# Alternatives in the patterns of GPT-2, Llama 3, Qwen, GPT-4o, Mistral's Tekken and DeepSeek. Each
# was reviewed by hand for the properties in the module docstring: no match contains a letter, digit
# or sign before a space, or a letter or digit before punctuation.
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
    """The places at which a tokenizer's texts can be divided.

    places       matches the two characters around a place
    words        divides a text at each place that is before a space
    drops_space  the second character around a place is a space that belongs to neither part
    """

    places: re.Pattern[str]
    words: Callable[[str], list[str]]
    drops_space: bool = False

    def parts(self, text: str, size: int) -> Iterator[str]:
        """Yield parts of about `size` characters; a part is longer if it contains no place."""
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
        match = last or self.places.search(text, wanted - 1)
        return len(text) if match is None else match.start() + 1


def longest_token(backend: Backend) -> int:
    """The maximum number of characters of text per token.

    This bound holds for tokenizers that put each character of a text into a token, as in the
    families above: a byte-level token has at least as many characters as the text it stands for.
    Other tokenizers may drop white space, or map consecutive unknown characters to one token. Real
    texts do not exceed the bound for that reason.
    """
    composed = 4 if {"NFC", "NFKC"} & {step["type"] for step in _steps(backend.normalizer)} else 1
    in_vocabulary = max(map(len, backend.get_vocab(with_added_tokens=False)), default=1)
    added = (len(token.content) for token in backend.get_added_tokens_decoder().values())
    return max(in_vocabulary * composed, *added, 1)


def division_of(backend: Backend) -> Division | None:
    """The Division of a tokenizer; None if no place in its texts is safe."""
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
    seen = r"[^\s\x00-\x20]"
    space = rf"{seen} "
    words = re.compile(rf"(?= )(?<={seen})").split
    if normalizers or any(step.get("add_prefix_space") for step in steps):
        return Division(re.compile(space), words)
    # Exclude the signs in special tokens, so that no place is within such a token.
    signs = _escaped(set(_PUNCTUATION) - set("".join(special)))
    return Division(re.compile(rf"{space}|[{_LETTERS}0-9][{signs}]"), words)


def _known(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel" | "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
            return not step["invert"] and set(_alternatives(pattern)) <= _ALTERNATIVES
    return False


def _separates_words(step: Mapping[str, Any]) -> bool:
    """Whether a step splits at spaces. Without such a step, merges may cross any place."""
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
        return None  # consecutive unknown characters become one token, across any place
    before = {
        token[at - 1]
        for token in vocabulary
        for at in range(1, len(token))
        if token[at] == MARK != token[at - 1]
    }
    # After a special token, the normalizer treats the rest as a new text with its own mark.
    no_place = _escaped(before | {content[-1] for content in special if content})
    left, right, drops = rf"[^\W_{no_place}]", r"(?=[^\W_])", prepended in normalizers
    between = f"(?<={left}) {right}" if drops else f"(?<={left})(?= {right})"
    return Division(re.compile(f"{left} {right}"), re.compile(between).split, drops)


def _idle(step: Mapping[str, Any]) -> bool:
    """Whether a step splits only at spaces, all of which the normalizer has replaced (Gemma)."""
    return bool(step["type"] == "Split" and step["pattern"] == {"String": " "})


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer as JSON, with nested sequences flattened."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def _flat(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner = step.get("normalizers", step.get("pretokenizers"))
    if inner is None:
        yield step
        return
    for inner_step in inner:
        yield from _flat(inner_step)


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern: it is split at each "|" outside of brackets."""
    alternatives, depth, in_class, at, begin = [], 0, False, 0, 0
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
            alternatives.append(pattern[begin:at])
            begin = at + 1
        at += 1
    return [*alternatives, pattern[begin:]]


def _escaped(characters: set[str]) -> str:
    """The characters, escaped for use inside a character class."""
    return "".join(map(re.escape, sorted(characters)))

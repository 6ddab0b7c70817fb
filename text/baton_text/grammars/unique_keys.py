"""Keep a grammar from writing a key of a JSON object twice.

A context-free grammar cannot tell which free keys (those of additionalProperties and
patternProperties) an object has already. This module follows the JSON objects in an answer, and
takes out of the mask each token that would complete a key a second time.

    Spellings   the tokens of one tokenizer by the keys that they complete
    Keys        the open objects of one answer; it depends only on the answer's tokens

An answer may have JSON within other text, and such text may have braces of its own. So each brace
that does not stand in an open object may begin an object, until a byte follows that JSON does not
allow; and where a key may repeat, `Keys` asks the grammar whether it is a key at all.

llguidance also writes characters as \\uXXXX, and does not take the name of a declared property in
that spelling for the same key. So a free key is never written that way: each key has one spelling,
and keys are compared as bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from llguidance import LLMatcher, LLTokenizer

_SPACE = b" \t\r\n"
_STRING = rb'"((?:[^"\\]|\\.)*)"'
# What a token writes of a key that is open, up to the quote that closes it; the same behind a
# backslash.
_HEAD = re.compile(rb'((?:[^"\\]|\\.)*)"', re.S)
_ESCAPED_HEAD = re.compile(rb'(.(?:[^"\\]|\\.)*)"', re.S)
_WHOLE = re.compile(rb"(?=" + _STRING + rb")", re.S)
_STRING_END = re.compile(rb'["\\]')
_HEX = b"0123456789abcdefABCDEF"
MAX_OBJECTS = 16  # places that may begin an object, at a time
MAX_LOOKS = 256  # tokens tried to find out whether a new key can follow


class Spellings:
    """The tokens of one tokenizer by what they write of keys. Made once; 0.5 us per token."""

    def __init__(self, tokenizer: LLTokenizer, special: Collection[int]) -> None:
        """`special`: ids that no text matches."""
        self.eos_ids = list(tokenizer.eos_tokens)
        self.special = frozenset((*special, *self.eos_ids))
        self.texts: list[bytes] = []
        self.heads: defaultdict[bytes, list[int]] = defaultdict(list)
        self.escaped_heads: defaultdict[bytes, list[int]] = defaultdict(list)
        # Tokens with a whole string, by the string; and those that end within a key, by its
        # beginning: tokens that begin with the key's quote, and others.
        self.wholes: defaultdict[bytes, list[int]] = defaultdict(list)
        self.openers: defaultdict[bytes, list[int]] = defaultdict(list)
        self.late_openers: defaultdict[bytes, list[int]] = defaultdict(list)
        self.doubles: list[int] = []  # tokens with one string twice
        self.unicode: list[int] = []  # tokens with \\u, and those that begin with u
        self.begin_with_u: list[int] = []
        self.plain: dict[bytes, int] = {}  # tokens without a quote
        for id in range(tokenizer.vocab_size):
            text = tokenizer.decode_bytes([id])
            self.texts.append(text)
            if id in self.special:
                continue
            if b"\\u" in text:
                self.unicode.append(id)
            if text.startswith(b"u"):
                self.begin_with_u.append(id)
            if b'"' in text:
                self._add(id, text)
            elif text:
                self.plain[text] = id

    def _add(self, id: int, text: bytes) -> None:
        if match := _HEAD.match(text):
            self.heads[match.group(1)].append(id)
        if match := _ESCAPED_HEAD.match(text):
            self.escaped_heads[match.group(1)].append(id)
        wholes = _WHOLE.findall(text)
        for whole in set(wholes):
            self.wholes[whole].append(id)
        if len(set(wholes)) < len(wholes):
            self.doubles.append(id)
        before, _, beginning = text.rpartition(b'"')
        if not before.strip(_SPACE):
            self.openers[beginning].append(id)
        elif b"," in before:
            self.late_openers[beginning].append(id)


class _Object:
    """A JSON object, as far as it is written. `feed` returns what follows it.

    `open` has the keys of each open object, None for an open array; `key` is the beginning of the
    key that is being written, None elsewhere. `repeats`: a key has been completed twice. `unicode`:
    a key has a character as \\uXXXX."""

    __slots__ = ("_escaped", "_state", "key", "open", "repeats", "unicode")

    def __init__(self) -> None:
        self.open: list[set[bytes] | None] = [set()]
        self.key: bytes | None = None
        self.repeats = self.unicode = False
        self._state = "first"  # what is expected: see _step
        self._escaped = False

    def copy(self) -> _Object:
        copied = _Object()
        copied.open = [None if keys is None else set(keys) for keys in self.open]
        copied.key, copied.repeats = self.key, self.repeats
        copied._state, copied._escaped = self._state, self._escaped
        return copied

    @property
    def in_string(self) -> bool:
        return self._state == "string" or self.key is not None

    @property
    def escaped(self) -> bool:
        """Whether the next byte of the string is escaped."""
        return self._escaped

    @property
    def expects_key(self) -> bool:
        return self._state in ("first", "key") and self.key is None

    @property
    def keys(self) -> set[bytes]:
        """The keys of the innermost object."""
        return self.open[-1] or set()

    def feed(self, text: bytes) -> bool:
        """Go on with `text`; return whether the object is still open and may be JSON."""
        place = 0
        while place < len(text):
            if self.in_string:
                place = self._in_string(text, place)
            elif not self._step(text[place : place + 1]):
                return False
            else:
                place += 1
        return True

    def _in_string(self, text: bytes, place: int) -> int:
        """Read a string up to its end or the end of `text`; return the place behind it."""
        if self._escaped:
            end = place + 1
            self._escaped = False
            self.unicode |= self.key is not None and text[place:end] == b"u"
        else:
            match = _STRING_END.search(text, place)
            end = len(text) if match is None else match.end()
            if match is not None and match.group() == b'"':
                self._close(text[place : end - 1])
                return end
            self._escaped = match is not None
        if self.key is not None:
            self.key += text[place:end]
        return end

    def _close(self, last: bytes) -> None:
        keys = self.open[-1]
        if self.key is None or keys is None:
            self._state = "after"
            return
        key = self.key + last
        self.repeats |= key in keys
        keys.add(key)
        self.key, self._state = None, "colon"

    def _step(self, byte: bytes) -> bool:
        """One byte outside of strings; return whether JSON allows it and the object is open."""
        if self._state == "scalar":
            if byte not in b",]}" and byte not in _SPACE:
                return byte.isalnum() or byte in b"+-."
            self._state = "after"
        if byte in _SPACE:
            return True
        state, is_object = self._state, self.open[-1] is not None
        if byte == b'"':
            if state in ("first", "key") and is_object:
                self.key = b""
                return True
            self._state = "string"
            return state in ("value", "item")
        if byte in b"{[":
            self.open.append(set() if byte == b"{" else None)
            self._state = "first" if byte == b"{" else "item"
            return state in ("value", "item")
        if byte in b"}]":
            matches = is_object == (byte == b"}")
            self.open.pop()
            self._state = "after"
            return matches and state in ("first", "item", "after") and bool(self.open)
        if byte == b",":
            self._state = "key" if is_object else "value"
            return state == "after"
        if byte == b":":
            self._state = "value"
            return state == "colon"
        self._state = "scalar"
        return state in ("value", "item") and byte in b"-0123456789tfn"


class Keys:
    """The objects of one answer that are open, as far as their keys matter.

    `narrow`: some keys must match a pattern as a whole, so a key that is begun may have no other
    ending than one that an object has already. `mixed`: not the whole answer is JSON."""

    __slots__ = ("_mixed", "_narrow", "_objects", "_spellings")

    def __init__(self, spellings: Spellings, *, narrow: bool, mixed: bool) -> None:
        self._spellings = spellings
        self._narrow = narrow
        self._mixed = mixed
        self._objects: list[_Object] = []

    def copy(self) -> Keys:
        copied = Keys(self._spellings, narrow=self._narrow, mixed=self._mixed)
        copied._objects = [opened.copy() for opened in self._objects]
        return copied

    def accept(self, ids: Sequence[int]) -> None:
        """Follow the answer's next tokens."""
        spellings = self._spellings
        for id in ids:
            if id in spellings.special or not 0 <= id < len(spellings.texts):
                self._objects = []
            else:
                self._objects = _followed(self._objects, spellings.texts[id])

    def unique(self, mask: bytes, matcher: LLMatcher) -> bytes:
        """The mask without tokens that complete a key again, or after which only such tokens can
        complete the key. `matcher` is in the state that has this mask."""
        spelt = self._escaping(mask)
        kept = mask
        if spelt and self._is_followed(spelt, _HEX, matcher):
            kept = _without(mask, spelt)
            # Only a declared name with a control character needs it.
            kept = kept if any(kept) else mask
        repeating = self._repeating(kept)
        if repeating and self._is_followed(repeating, b": \t\r\n", matcher):
            kept = _without(kept, repeating)
        if self._narrow:
            kept = _without(kept, self._blind(kept, matcher))
        return kept

    def eos_mask(self, size: int) -> bytes:
        """A mask of `size` bytes that permits only EOS."""
        mask = bytearray(size)
        for id in self._spellings.eos_ids:
            mask[id // 8] |= 1 << id % 8
        return bytes(mask)

    def _after(self, id: int) -> list[_Object]:
        """The objects after a token, those included that it begins and closes."""
        objects = [opened.copy() for opened in self._objects]
        for opened in objects:
            opened.repeats = opened.unicode = False
        _followed(objects, self._spellings.texts[id], began=objects)
        return objects

    def _escaping(self, mask: bytes) -> list[int]:
        """The tokens of the mask that write a character of a key as \\uXXXX."""
        spellings = self._spellings
        tried = list(spellings.unicode)
        if any(opened.key is not None and opened.escaped for opened in self._objects):
            tried += spellings.begin_with_u
        return [
            id for id in tried if _has(mask, id) and any(after.unicode for after in self._after(id))
        ]

    def _repeating(self, mask: bytes) -> list[int]:
        """The tokens of the mask that complete a key again."""
        spellings, tried = self._spellings, set(self._spellings.doubles)
        for opened in self._objects:
            if opened.key is not None:
                heads = spellings.escaped_heads if opened.escaped else spellings.heads
                for rest in _rests(opened.keys, opened.key):
                    tried.update(heads.get(rest, ()))
            for keys in filter(None, opened.open):
                for key in keys & spellings.wholes.keys():
                    tried.update(spellings.wholes[key])
        return [
            id for id in tried if _has(mask, id) and any(after.repeats for after in self._after(id))
        ]

    def _is_followed(self, ids: Sequence[int], by: bytes, matcher: LLMatcher) -> bool:
        """Whether these tokens, which JSON reads as a part of a key, are that in the grammar: only
        texts that start with one of the bytes `by` may follow the shortest of them."""
        if not self._mixed:
            return True
        texts = self._spellings.texts
        next = matcher.deep_copy()
        next.consume_token(min(ids, key=lambda id: len(texts[id])))
        follows = _ids(next.compute_bitmask())
        return all(texts[id][:1] in by for id in islice(follows, MAX_LOOKS))

    def _blind(self, mask: bytes, matcher: LLMatcher) -> list[int]:
        """The tokens of `mask` that begin or continue a key which no new key begins with."""
        spellings, tried = self._spellings, set[int]()
        for opened in self._objects:
            if opened.key is not None:
                tried |= self._continuing(opened.keys, opened.key)
            for keys in filter(None, opened.open):
                for key in keys:
                    for end in range(1, len(key) + 1):
                        tried.update(spellings.late_openers.get(key[:end], ()))
                        if opened.expects_key:
                            tried.update(spellings.openers.get(key[:end], ()))
        known: dict[tuple[int, bytes], bool] = {}
        found = []
        for id in tried:
            for opened in self._after(id) if _has(mask, id) else ():
                if opened.key is not None and opened.keys:
                    state = len(opened.open), opened.key
                    if state not in known:
                        known[state] = self._may_differ(opened, matcher, id)
                    if not known[state]:
                        found.append(id)
                        break
        return found

    def _continuing(self, keys: set[bytes], key: bytes) -> set[int]:
        """The tokens that continue `key` towards one of `keys`."""
        plain = self._spellings.plain
        return {
            plain[rest[:end]]
            for rest in _rests(keys, key)
            for end in range(1, len(rest) + 1)
            if rest[:end] in plain
        }

    def _may_differ(self, opened: _Object, matcher: LLMatcher, id: int) -> bool:
        """Whether the key that is open after the token `id` may become a new one."""
        next = matcher.deep_copy()
        next.consume_token(id)
        pending, looks = [(next, opened.key or b"")], 0
        while pending and looks < MAX_LOOKS:
            looks += 1
            next, key = pending.pop()
            if not any(True for _ in _rests(opened.keys, key)) or key.endswith(b"\\"):
                return True
            same = self._continuing(opened.keys, key)
            ends = {
                same_id
                for rest in _rests(opened.keys, key)
                for same_id in self._spellings.heads[rest]
            }
            mask = next.compute_bitmask()
            if any(_without(mask, [same_id for same_id in same | ends if _has(mask, same_id)])):
                return True
            for same_id in same:
                if _has(mask, same_id):
                    after = next.deep_copy()
                    after.consume_token(same_id)
                    pending.append((after, key + self._spellings.texts[same_id]))
        return bool(pending)


def _followed(
    objects: list[_Object], text: bytes, began: list[_Object] | None = None
) -> list[_Object]:
    """The objects that are open after `text`. A brace begins one, unless it stands in an open
    object, outside of strings. Those that begin are added to `began`."""
    *pieces, last = text.split(b"{")
    alive = list(objects)
    for piece in pieces:
        alive = [opened for opened in alive if opened.feed(piece)]
        outside = [opened for opened in alive if not opened.in_string]
        alive = [opened for opened in alive if opened.feed(b"{")]
        if not any(opened in alive for opened in outside):
            alive = [*alive[1 - MAX_OBJECTS :], _Object()]
            if began is not None:
                began.append(alive[-1])
    return [opened for opened in alive if opened.feed(last)]


def _rests(keys: set[bytes], key: bytes) -> Iterator[bytes]:
    """What is left of each of `keys` behind `key`."""
    return (name[len(key) :] for name in keys if name.startswith(key))


def _ids(mask: bytes) -> Iterator[int]:
    return (8 * at + n for at, byte in enumerate(mask) if byte for n in range(8) if byte >> n & 1)


def _has(mask: bytes, id: int) -> bool:
    return id // 8 < len(mask) and bool(mask[id // 8] >> id % 8 & 1)


def _without(mask: bytes, ids: Sequence[int]) -> bytes:
    if not ids:
        return mask
    left = bytearray(mask)
    for id in ids:
        left[id // 8] &= ~(1 << id % 8)
    return bytes(left)

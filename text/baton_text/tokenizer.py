"""Encode and decode with a model's tokenizer.json, as transformers' AutoTokenizer would.

In: artifacts. Out: ids, text, vocabulary size, EOS ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton_text.artifacts import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ArtifactError,
    load_json,
    special_tokens,
    token_content,
)
from baton_text.division import division_of, longest_token
from baton_text.pieces import Spelling, spelling_of
from baton_text.word_ids import WordIds

# Characters above which an event loop should encode a text in a thread.
LONG_TEXT = 8192
# Characters per part of a text that can be divided. Encoding takes 100 to 250 bytes of memory per
# character, so 16 MB for a part.
PART = 1 << 16
# Between two parts, for the threads that wait for the GIL; without a pause this one gets it again.
PAUSE_S = 1e-4
# Maximum number of characters encoded at once: 250 MB.
MOST_AT_ONCE = 1 << 20
# Size of the cache of token bytes; texts use a small part of the vocabulary.
PIECES = 32_768

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TextTooLong(Exception):
    """A text has `args[0]` characters without a place to divide it, more than MOST_AT_ONCE."""


class Tokenizer:
    """One model's tokenizer. Immutable after loading, so threads can share it."""

    def __init__(self, backend: Backend, spelling: Spelling, eos_ids: tuple[int, ...]) -> None:
        self._backend = backend
        self.spelling = spelling
        self.eos_ids = eos_ids
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # Text -> id of special and other added tokens, which are recognized anywhere in a text.
        self.added_tokens = {str(token.content): int(index) for index, token in added.items()}
        self._piece = lru_cache(PIECES)(self._spell)
        self.division = division_of(backend)
        self._words = (
            None if self.division is None else WordIds(backend, self.division, self.shared)
        )
        # The ids that encode() adds before and after a text when it adds special tokens.
        self.around = _special_around(backend)
        # The same of two texts: before, between and after them.
        self.around_pair = _special_around_pair(backend)
        # Whether the ids of a pair have type 0 before the second text and type 1 from it on.
        self._types_second = _types_second(backend)
        # One int object per id, shared by all prompts: saves 32 of 40 bytes per token.
        self._ints = tuple(range(max(backend.get_vocab().values(), default=-1) + 1))
        self.longest_token = longest_token(backend)

    @classmethod
    def from_artifacts(cls, artifacts: Mapping[str, bytes]) -> Tokenizer:
        """Load a tokenizer. Raise ArtifactError if tokenizer.json is missing or unusable."""
        data = artifacts.get(TOKENIZER)
        if data is None:
            raise ArtifactError(f"{TOKENIZER} is missing; found {sorted(artifacts)}")
        try:
            backend = Backend.from_buffer(data)
        except ValueError as error:
            raise ArtifactError(f"{TOKENIZER} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = load_json(artifacts, TOKENIZER_CONFIG)
        named = special_tokens(artifacts)
        _add_configured_tokens(backend, config, named)
        decoder = backend.decoder
        spelling = spelling_of(json.loads(decoder.__getstate__()) if decoder else None)
        return cls(backend, spelling, _eos_ids(backend, artifacts, named))

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token, added ones included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text` to ids; special tokens spelled in the text become their ids.

        `add_special_tokens` adds the tokens that tokenizer.json puts around a text, such as BOS.
        Set it for a plain prompt, but not for a rendered chat, whose template writes them. As in
        transformers 5, tokenizer_config.json's add_bos_token does not override tokenizer.json.
        """
        ids = None if self._words is None else self._words.encode(text)
        if ids is not None:
            before, after = self.around if add_special_tokens else ((), ())
            return [*before, *ids, *after] if before or after else ids
        # encode_batch, because the library releases the GIL only for batches, and 3 MB take 3 s.
        # The fast variant, because it skips the offsets, which are not needed. A batch of one text,
        # because the library encodes larger batches on all cores, for twice the CPU time.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return self.shared(encoding.ids)

    def join_pair(
        self, first: Sequence[int], second: Sequence[int], add_special_tokens: bool = True
    ) -> tuple[list[int], int]:
        """The ids of two texts as those of one prompt, with the special tokens that tokenizer.json
        puts around a pair, as classifiers of pairs read them. Return also the place at which the
        second text begins if tokenizer.json tells the two apart by token types, else 0."""
        before, between, after = self.around_pair if add_special_tokens else ((), (), ())
        ids = [*before, *first, *between, *second, *after]
        place = len(before) + len(first) + len(between)
        return ids, place if self._types_second else 0

    def encode_up_to(
        self, text: str, most: int, add_special_tokens: bool = True, part_size: int = PART
    ) -> tuple[list[int], bool]:
        """Encode `text`; stop early once there are more than `most` ids.

        Return the ids, and whether they are complete. Incomplete ids are the first ones, and more
        than `most`.

        A long text is encoded in parts of about `part_size` characters if the tokenizer allows
        (see `division`), so the encoder's memory does not grow with the text. Raise TextTooLong for
        a part that is longer than MOST_AT_ONCE.
        """
        if len(text) <= part_size:
            return self.encode(text, add_special_tokens), True
        before, after = self.around if add_special_tokens else ((), ())
        ids = list(before)
        for part in self._parts(text, part_size):
            if len(ids) > most:
                return ids, False
            ids += self._part_ids(part)
        ids += after
        return ids, True

    def to_json(self) -> str:
        """tokenizer.json including the tokens added from other files."""
        return str(self._backend.to_str())

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The (start, end) characters of `text` that each of its ids covers, end exclusive.

        Without the special tokens around a text."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        spans: list[tuple[int, int]] = encoding.offsets
        return spans

    def encode_last(
        self, text: str, most: int, add_special_tokens: bool = True, part_size: int = PART
    ) -> list[int]:
        """The last `most` ids of `text`, or all ids if there are fewer.

        Encodes only the last parts of a long text. Raises TextTooLong like encode_up_to.
        """
        if len(text) <= part_size:
            return self.encode(text, add_special_tokens)[-most:]
        before, after = self.around if add_special_tokens else ((), ())
        parts_ids, count = [list(after)], len(after)
        for part in reversed(list(self._parts(text, part_size))):
            if count >= most:
                break
            parts_ids.append(self._part_ids(part))
            count += len(parts_ids[-1])
        else:
            parts_ids.append(list(before))
        return [token for ids in reversed(parts_ids) for token in ids][-most:]

    def _parts(self, text: str, size: int) -> Iterable[str]:
        return self.division.parts(text, size) if self.division is not None else [text]

    def _part_ids(self, part: str) -> list[int]:
        if len(part) > MOST_AT_ONCE:
            raise TextTooLong(len(part))
        if len(part) > LONG_TEXT:  # known words are found without releasing the GIL
            time.sleep(PAUSE_S)
        return self.encode(part, add_special_tokens=False)

    def shared(self, ids: Sequence[int]) -> list[int]:
        """The same ids as int objects that all prompts share, to save memory."""
        ints, known = self._ints, len(self._ints)
        return [ints[index] if 0 <= index < known else index for index in ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode a complete sequence. For a stream of ids, use a Detokenizer."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def piece(
        self, token_id: int, *, first: bool = False, skip_special: bool = False
    ) -> bytes | None:
        """The bytes that an id adds to a text; `first`: no earlier id has been shown.

        None for an id that is not shown: an unknown id, or a special one with `skip_special`.
        """
        return self._piece(token_id, first, skip_special)

    def _spell(self, token_id: int, first: bool, skip_special: bool) -> bytes | None:
        if skip_special and token_id in self.special_ids:
            return None
        if not 0 <= token_id < 2**32:  # the library raises unless the id is an unsigned 32-bit int
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return None if token is None else self.spelling.piece(token, first)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in mid-text, possibly part of a character; a special one as text."""
        return self.piece(token_id) or b""

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as `Ġthe`; empty for an unknown id."""
        return str(self._backend.id_to_token(token_id) or "")

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _special_around(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of special tokens that encoding adds before and after a text (BOS, EOS)."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids: list[int] = encoding.ids
    own = [at for at, special in enumerate(encoding.special_tokens_mask) if not special]
    if not own:
        return tuple(ids), ()
    return tuple(ids[: own[0]]), tuple(ids[own[-1] + 1 :])


def _special_around_pair(
    backend: Backend,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The ids of special tokens that encoding adds before, between and after two texts."""
    encoding = backend.encode("a", "a", add_special_tokens=True)
    ids: list[int] = encoding.ids
    own = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    if not own:
        return tuple(ids), (), ()
    second = encoding.sequence_ids.index(1)
    last = max(at for at in own if at < second)
    return tuple(ids[: own[0]]), tuple(ids[last + 1 : second]), tuple(ids[own[-1] + 1 :])


def _types_second(backend: Backend) -> bool:
    encoding = backend.encode("a", "a", add_special_tokens=True)
    if 1 not in encoding.sequence_ids:
        return False
    second = encoding.sequence_ids.index(1)
    return not any(encoding.type_ids[:second]) and all(encoding.type_ids[second:])


def _add_configured_tokens(
    backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add tokens to `backend` that only tokenizer_config.json or special_tokens_map.json names."""
    existing = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text, entry in _declared_tokens(config):
        if text not in existing:
            flags = {name: bool(entry[name]) for name in _TOKEN_FLAGS if name in entry}
            backend.add_tokens([AddedToken(text, **flags)])
            existing.add(text)
    for text in dict.fromkeys([*named.values(), *_extra_tokens(config)]):
        if text not in existing:
            backend.add_special_tokens([AddedToken(text, special=True)])


def _declared_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tokens of added_tokens_decoder by their ids' order. Raise ArtifactError."""
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(id.isdecimal() for id in declared):
        raise ArtifactError(f"{TOKENIZER_CONFIG}: added_tokens_decoder is no object of token ids")
    for id, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise ArtifactError(
                f"{TOKENIZER_CONFIG}: added_tokens_decoder {id} is no object with a text as content"
            )
        yield text, entry


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    for name in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(name)
        if extra and not isinstance(extra, dict | list):
            raise ArtifactError(f"{TOKENIZER_CONFIG}: {name} is {extra!r}, not a list or an object")
        if extra:
            values = extra.values() if isinstance(extra, dict) else extra
            return [text for text in map(token_content, values) if text is not None]
    return []


def _eos_ids(
    backend: Backend, artifacts: Mapping[str, bytes], named: Mapping[str, str]
) -> tuple[int, ...]:
    """EOS ids of generation_config.json, else config.json, else the id of the named eos_token.

    Raise ArtifactError if eos_token_id is neither an id nor a list of ids."""
    for name in (GENERATION_CONFIG, CONFIG):
        value = load_json(artifacts, name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None:
            if not all(type(index) is int and index >= 0 for index in ids):
                raise ArtifactError(
                    f"{name}: eos_token_id is {value!r}, not an id or a list of ids"
                )
            return tuple(dict.fromkeys(ids))
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return () if eos is None else (eos,)

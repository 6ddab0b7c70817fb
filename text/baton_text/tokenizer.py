"""Encode and decode with a model's tokenizer.json, as transformers' AutoTokenizer would.

In: artifacts. Out: ids, text, and the numbers others need (vocabulary size, EOS ids).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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

# Characters; an event loop has longer ones encoded in a thread.
LONG_TEXT = 8192
# Characters that are encoded at once, where a text may be divided: each takes 100 to 250 bytes
# meanwhile, so a part takes 16 MB. And those that ever are: 250 MB.
PART = 1 << 16
MOST_AT_ONCE = 1 << 20
# Tokens whose bytes are remembered: a text's are few of the vocabulary's.
PIECES = 32_768

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TextTooLong(Exception):
    """So many characters (`args[0]`) in a row cannot be divided, and are too many to be encoded at
    once."""


class Tokenizer:
    """One model's tokenizer. Safe to share between threads: nothing changes after loading."""

    def __init__(self, backend: Backend, spelling: Spelling, eos_ids: tuple[int, ...]) -> None:
        self._backend = backend
        self.spelling = spelling
        self.eos_ids = eos_ids
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # Special ones and others that are tokens wherever a text has them, by their text.
        self.added_tokens = {str(token.content): int(index) for index, token in added.items()}
        self._piece = lru_cache(PIECES)(self._spell)
        self.division = division_of(backend)
        # What encode() puts before and behind a text where special tokens are added.
        self.around = _special_around(backend)
        # One int per id, for all prompts: of its own, each takes 32 bytes beside its place of 8.
        self._ints = tuple(range(max(backend.get_vocab().values(), default=-1) + 1))
        self.longest_token = longest_token(backend)

    @classmethod
    def from_artifacts(cls, artifacts: Mapping[str, bytes]) -> Tokenizer:
        """Raises ArtifactError if tokenizer.json is missing or cannot be used."""
        data = artifacts.get(TOKENIZER)
        if data is None:
            raise ArtifactError(f"{TOKENIZER} is missing; there are {sorted(artifacts)}")
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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled in it become their ids.

        `add_special_tokens` adds what tokenizer.json puts around a text (BOS, ...): wanted for a
        plain prompt, not for a rendered chat, whose template writes them itself. As in transformers
        5, tokenizer_config.json's add_bos_token does not overrule tokenizer.json.
        """
        # A batch, since the library lets other Python threads run only while it encodes one, and
        # 3 MB take it 3 s; the fast kind, since nobody asks where in the text a token stands. Of
        # one text: several at once would be encoded on all cores, for twice the CPU time.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_up_to(
        self, text: str, most: int, add_special_tokens: bool = True, part_size: int = PART
    ) -> tuple[list[int], bool]:
        """Ids of `text`, and whether they are all; a text of more than `most` may have only its
        first ones, which are more than `most`.

        A long text is encoded in parts, where its tokenizer lets it be divided (see `division`):
        what it takes in memory does not grow with it. Raise TextTooLong for one that would have to
        be encoded at once and is too long for that.
        """
        if len(text) <= part_size:
            return self.shared(self.encode(text, add_special_tokens)), True
        before, after = self.around if add_special_tokens else ((), ())
        ids = list(before)
        for part in self._parts(text, part_size):
            if len(ids) > most:
                return ids, False
            ids += self._part_ids(part)
        ids += after
        return ids, True

    def to_json(self) -> str:
        """tokenizer.json with all the tokens that this tokenizer knows."""
        return str(self._backend.to_str())

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Which characters of `text` each of its ids came from: the first, and the one behind the
        last. Special tokens are not added."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        spans: list[tuple[int, int]] = encoding.offsets
        return spans

    def encode_last(
        self, text: str, most: int, add_special_tokens: bool = True, part_size: int = PART
    ) -> list[int]:
        """The last `most` ids of `text`, or all where it has no more.

        Of a long text only its last parts are encoded. Raise TextTooLong as encode_up_to.
        """
        if len(text) <= part_size:
            return self.shared(self.encode(text, add_special_tokens))[-most:]
        before, after = self.around if add_special_tokens else ((), ())
        found, count = [list(after)], len(after)
        for part in reversed(list(self._parts(text, part_size))):
            if count >= most:
                break
            found.append(self._part_ids(part))
            count += len(found[-1])
        else:
            found.append(list(before))
        return [token for ids in reversed(found) for token in ids][-most:]

    def _parts(self, text: str, size: int) -> Iterable[str]:
        return self.division.parts(text, size) if self.division is not None else [text]

    def _part_ids(self, part: str) -> list[int]:
        if len(part) > MOST_AT_ONCE:
            raise TextTooLong(len(part))
        return self.shared(self.encode(part, add_special_tokens=False))

    def shared(self, ids: Sequence[int]) -> list[int]:
        """The same ids, as ints that all prompts share."""
        ints, known = self._ints, len(self._ints)
        return [ints[index] if 0 <= index < known else index for index in ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. While ids still arrive, use a Detokenizer."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def piece(
        self, token_id: int, *, first: bool = False, skip_special: bool = False
    ) -> bytes | None:
        """Bytes that an id adds to a text; `first` says that no id before it was shown.

        None for an id that is not shown: it stands for nothing, or is special and skipped.
        """
        return self._piece(token_id, first, skip_special)

    def _spell(self, token_id: int, first: bool, skip_special: bool) -> bytes | None:
        if skip_special and token_id in self.special_ids:
            return None
        if not 0 <= token_id < 2**32:  # the library raises for what is no unsigned 32-bit number
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return None if token is None else self.spelling.piece(token, first)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token in mid-text, possibly half a character; special tokens as written."""
        return self.piece(token_id) or b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; a half character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _special_around(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is put before and behind a text where special tokens are added (BOS, EOS)."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids: list[int] = encoding.ids
    own = [at for at, special in enumerate(encoding.special_tokens_mask) if not special]
    if not own:
        return tuple(ids), ()
    return tuple(ids[: own[0]]), tuple(ids[own[-1] + 1 :])


def _add_configured_tokens(
    backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json knows, and named ones that are not yet special."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=_numeric):
        if entry["content"] not in known:
            flags = {name: bool(entry[name]) for name in _TOKEN_FLAGS if name in entry}
            backend.add_tokens([AddedToken(entry["content"], **flags)])
            known.add(entry["content"])
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(more.values()) if isinstance(more, dict) else list(more)
    texts = [*named.values(), *(text for text in map(token_content, extra) if text is not None)]
    for text in dict.fromkeys(texts):
        if text not in known:
            backend.add_special_tokens([AddedToken(text, special=True)])


def _numeric(item: tuple[str, object]) -> int:
    return int(item[0])


def _eos_ids(
    backend: Backend, artifacts: Mapping[str, bytes], named: Mapping[str, str]
) -> tuple[int, ...]:
    """generation_config.json's list, else config.json's, else tokenizer_config.json's eos_token."""
    for name in (GENERATION_CONFIG, CONFIG):
        value = load_json(artifacts, name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None:
            if not all(isinstance(index, int) for index in ids):
                raise ArtifactError(
                    f"{name}: eos_token_id is {value!r}, not an id or a list of ids"
                )
            return tuple(dict.fromkeys(ids))
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return () if eos is None else (eos,)

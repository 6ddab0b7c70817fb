"""The names that a pattern of `patternProperties` matches, if they are few.

In: a pattern. Out: its names, or None if there are many or infinitely many. llguidance reads the
pattern, so a name counts exactly if a grammar could write it as a key.
"""

from __future__ import annotations

import json
from collections import deque
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from baton_text.artifacts import byte_artifacts
from baton_text.grammars.limits import JSON_OPTIONS, LIMITS
from baton_text.tokenizer import Tokenizer

MAX_NAMES = 64  # more are many
_MAX_STEPS = 512  # prefixes of names that are looked at; 0.1 ms each


@lru_cache(1)
def byte_tokenizer() -> LLTokenizer:
    """A tokenizer whose first 256 ids are the bytes."""
    tokenizer = Tokenizer.from_artifacts(byte_artifacts())
    return LLTokenizer(tokenizer.to_json(), eos_token=list(tokenizer.eos_ids), slices=[])


@lru_cache(256)
def few_names(pattern: str) -> tuple[str, ...] | None:
    """The names that match, at most MAX_NAMES; None if there are more, or if the pattern does not
    compile."""
    start = _key(pattern)
    if start is None:
        return None
    if start.is_error():
        return ()
    if not is_whole(pattern):
        return None
    names: list[str] = []
    pending = deque([(b'"', start)])
    steps = 0
    while pending:
        prefix, matcher = pending.popleft()
        steps += 1
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for byte in range(256):
            if not mask >> byte & 1:
                continue
            if byte == ord('"'):
                names.append(json.loads(prefix + b'"'))
            else:
                longer = matcher.deep_copy()
                longer.consume_token(byte)
                pending.append((prefix + bytes((byte,)), longer))
        if len(names) > MAX_NAMES or steps + len(pending) > _MAX_STEPS:
            return None
    return tuple(dict.fromkeys(names))  # an escaped character has two spellings


def is_whole(pattern: str) -> bool:
    """Whether a pattern may limit the whole name. Otherwise any text may stand before or after what
    it matches."""
    return "^" in pattern and "$" in pattern


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name."""
    start = _key(pattern)
    text = json.dumps(name, ensure_ascii=False).encode()[1:]
    return start is not None and start.validate_tokens(list(text)) == len(text)


def _key(pattern: str) -> LLMatcher | None:
    """A matcher of keys behind their first quote, in error if no key matches; None if the pattern
    does not compile."""
    schema = {"type": "string", "pattern": pattern}
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()  # finds out whether any text matches
    if matcher.is_error():
        errors = ("NoExtension" in matcher.get_error(), "Regex is empty" in matcher.get_error())
        return matcher if any(errors) else None
    matcher.consume_token(ord('"'))
    return matcher

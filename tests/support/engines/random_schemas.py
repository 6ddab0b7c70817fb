"""Random JSON schemas, and random answers in a grammar. Both depend only on the random generator.

Schemas have properties, patternProperties, required, enum, const, anyOf, oneOf, allOf, $ref, bounds
and additionalProperties, some of which exclude each other. Strings and arrays are bounded, so that
a random answer ends.
"""

from __future__ import annotations

import random
from typing import Any

from baton_text.grammars.matcher import Matcher

NAMES = ("a", "b", "c", "ab", "x_1", 'q"')
PATTERNS = ("^[ab]$", "^x_", "^[a-c]{1,2}$", "b$", "^(ab|x_1)$", "^[a-d]+_$", "")
TEXTS = ("a", "b", "red", 'say "no"\n', "\x01", "é")
WORDS = ("^[a-f]{1,4}$", "^\\d+$", "a|b", "^$")
DEEPEST = 3


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema with definitions to which it may refer."""
    schema = _object(rng, 0) if rng.random() < 0.6 else _schema(rng, 0)
    made = schema if isinstance(schema, dict) else {"anyOf": [schema, {"type": "null"}]}
    return {**made, "$defs": {name: _schema(rng, 2) for name in ("d", "e")}}


def _schema(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.04:
        return rng.random() < 0.6
    makers = [_integer, _number, _string, _enum, _const, _plain]
    if depth < DEEPEST:
        makers += [_object, _object, _array, _union, _all, _reference]
    return rng.choice(makers)(rng, depth)


def _plain(rng: random.Random, depth: int) -> Any:
    return {"type": rng.choice(["null", "boolean", ["integer", "null"]])}


def _integer(rng: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": "integer"}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if rng.random() < 0.5:
            made[key] = rng.randint(-9, 99)
    if rng.random() < 0.2:
        made["multipleOf"] = rng.choice([2, 5, 10])
    return made


def _number(rng: random.Random, depth: int) -> Any:
    low = rng.randint(-5, 5)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(-1, 9)}


def _string(rng: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": "string", "maxLength": rng.randint(0, 6)}
    if rng.random() < 0.3:
        made["minLength"] = rng.randint(0, 4)
    if rng.random() < 0.3:
        made["pattern"] = rng.choice(WORDS)
    if rng.random() < 0.1:
        made["format"] = rng.choice(["date", "uuid", "path", "ipv4"])
        del made["maxLength"]
    return made


def _enum(rng: random.Random, depth: int) -> Any:
    values: list[Any] = [*TEXTS, 1, 2.5, None, True, {"a": 1}, [1]]
    made: dict[str, Any] = {"enum": rng.sample(values, rng.randint(1, 4))}
    if rng.random() < 0.3:
        made["type"] = rng.choice(["string", "integer"])
    return made


def _const(rng: random.Random, depth: int) -> Any:
    return {"const": rng.choice([*TEXTS, 3, None, {"b": [True]}])}


def _array(rng: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": "array", "maxItems": rng.randint(0, 3)}
    if rng.random() < 0.8:
        made["items"] = _schema(rng, depth + 1)
    if rng.random() < 0.3:
        made["prefixItems"] = [_schema(rng, depth + 1)]
    if rng.random() < 0.3:
        made["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.2:
        made["uniqueItems"] = rng.random() < 0.3
    return made


def _union(rng: random.Random, depth: int) -> Any:
    key = "anyOf" if rng.random() < 0.8 else "oneOf"
    return {key: [_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _all(rng: random.Random, depth: int) -> Any:
    return {"allOf": [_object(rng, depth + 1), _object(rng, depth + 1)]}


def _reference(rng: random.Random, depth: int) -> Any:
    return {"$ref": rng.choice(["#/$defs/d", "#/$defs/e", "#", "#/$defs/d"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"}
    if rng.random() < 0.8:
        names = rng.sample(NAMES, rng.randint(0, 3))
        made["properties"] = {name: _schema(rng, depth + 1) for name in names}
        if rng.random() < 0.6:
            made["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.4:
        chosen = rng.sample(PATTERNS, 1 if rng.random() < 0.8 else 2)
        made["patternProperties"] = {pattern: _schema(rng, depth + 1) for pattern in chosen}
    if rng.random() < 0.7:
        closed = rng.random() < 0.6
        made["additionalProperties"] = False if closed else _schema(rng, depth + 1)
    for key in ("minProperties", "maxProperties"):
        if rng.random() < 0.15:
            made[key] = rng.randint(0, 3)
    if rng.random() < 0.1:
        made["propertyNames"] = rng.choice([{"type": "string"}, True, {"maxLength": 3}])
    return made


def one_of_each_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What json.loads makes of an object's pairs, if no key stands twice."""
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"a key stands twice: {keys}"
    return dict(pairs)


def random_answer(
    matcher: Matcher, rng: random.Random, closing: frozenset[int], eos: frozenset[int], most: int
) -> tuple[list[int], str]:
    """Tokens that the matcher allows, one after another, and how the answer ends: `stop`, `length`
    after `most` tokens, or `error`. Ids in `closing` are chosen in half of the steps in which one
    is allowed, so that strings and objects end."""
    ids: list[int] = []
    while len(ids) < most:
        mask = matcher.mask()
        allowed = [
            8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8)
            if byte >> bit & 1
        ]  # fmt: skip
        if matcher.error:
            return ids, "error"
        ends = [id for id in allowed if id in closing]
        id = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        if id in eos:
            return ids, "stop" if matcher.complete else "error"
        assert matcher.accept((id,)), "the mask allows the token"
        ids.append(id)
        if matcher.stopped:
            return ids, "stop" if matcher.complete else "error"
    return ids, "length"

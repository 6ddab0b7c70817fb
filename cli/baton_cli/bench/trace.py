"""Requests out of a trace in Mooncake's form: when, how long, and which blocks they share.

In: a JSONL file whose lines hold `timestamp` in ms, `input_length` and `output_length` in tokens
and `hash_ids`, one per 512 tokens of the prompt. Out: a Workload and its arrival times. Equal hash
ids give equal tokens, so prompts share the prefixes that the traced ones shared; what no hash id
covers is a request's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from baton_cli.bench.workload import Ask, Workload
from baton_cli.errors import CommandError

BLOCK_TOKENS = 512

_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class Line(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Tokens
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: tuple[int, ...] = ()


def trace(
    path: Path, *, count: int, vocab_size: int, output_len: int | None, seed: int
) -> tuple[Workload, list[float]]:
    """The first `count` lines, in order of time; seconds since the first of them. Raise
    CommandError naming the line that is wrong."""
    lines = sorted(_read(path, count), key=lambda line: line.timestamp)
    if not lines:
        raise CommandError(f"--dataset-path {path} holds no request")
    asks = [
        Ask(prompt(line, number, vocab_size, seed), output_len or max(1, line.output_length))
        for number, line in enumerate(lines)
    ]
    begin = lines[0].timestamp
    return Workload("trace", tuple(asks)), [(line.timestamp - begin) / 1e3 for line in lines]


def prompt(line: Line, number: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """A line's token ids; `number` makes those its own that no hash id covers."""
    covered = min(line.input_length, BLOCK_TOKENS * len(line.hash_ids))
    ids = [
        one
        for hash_id in line.hash_ids
        for one in _drawn(f"{seed}-block-{hash_id}", BLOCK_TOKENS, vocab_size)
    ][:covered]
    return (*ids, *_drawn(f"{seed}-own-{number}", line.input_length - covered, vocab_size))


def _drawn(name: str, count: int, vocab_size: int) -> list[int]:
    return random.Random(name).choices(range(vocab_size), k=count)


def _read(path: Path, count: int) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    found = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                if found == count:
                    return
                found += 1
                try:
                    yield decoder.decode(text)
                except msgspec.MsgspecError as error:
                    raise CommandError(f"--dataset-path {path}, line {number}: {error}") from error
    except OSError as error:
        raise CommandError(f"--dataset-path {path}: {error}") from error

"""Reads requests from a trace in Mooncake's format: arrival times, lengths and shared blocks.

In: a JSONL file whose lines hold `timestamp` in ms, `input_length` and `output_length` in tokens
and `hash_ids`, one per 512 tokens of the prompt. Out: a Workload and its arrival times. Equal hash
ids give equal tokens, so prompts share the same prefixes as in the trace. Tokens that no hash id
covers are unique to their request.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from baton_cli.bench.workload import Workload, WorkloadItem
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
    """Return the file's first `count` requests in order of time, and their arrival times in seconds
    since the first. Raise CommandError, which names a malformed line."""
    lines = sorted(_read(path, count), key=lambda line: line.timestamp)
    if not lines:
        raise CommandError(f"--dataset-path {path} holds no request")
    items = [
        WorkloadItem(
            prompt(line, number, vocab_size, seed), output_len or max(1, line.output_length)
        )
        for number, line in enumerate(lines)
    ]
    begin = lines[0].timestamp
    return Workload("trace", tuple(items)), [(line.timestamp - begin) / 1e3 for line in lines]


def prompt(line: Line, number: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return a line's token ids. Those that no hash id covers are drawn from `number`, so they are
    unique to the request."""
    covered = min(line.input_length, BLOCK_TOKENS * len(line.hash_ids))
    ids = [
        token
        for hash_id in line.hash_ids
        for token in _draw(f"{seed}-block-{hash_id}", BLOCK_TOKENS, vocab_size)
    ][:covered]
    return (*ids, *_draw(f"{seed}-own-{number}", line.input_length - covered, vocab_size))


def _draw(name: str, count: int, vocab_size: int) -> list[int]:
    return random.Random(name).choices(range(vocab_size), k=count)


def _read(path: Path, count: int) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    yielded = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                if yielded == count:
                    return
                yielded += 1
                try:
                    yield decoder.decode(text)
                except msgspec.MsgspecError as error:
                    raise CommandError(f"--dataset-path {path}, line {number}: {error}") from error
    except OSError as error:
        raise CommandError(f"--dataset-path {path}: {error}") from error

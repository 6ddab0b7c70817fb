"""Reads prompts and answer lengths from a file in ShareGPT's format.

In: a JSON list of objects whose `conversations` list holds turns with a `value`. Out: a Workload of
first turns; each gets as many new tokens as the second turn has. Conversations that are too short
or too long are left out by the limits of vLLM's bench, so that figures are comparable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from baton_cli.bench.workload import Workload, WorkloadItem
from baton_cli.errors import CommandError
from baton_text.tokenizer import Tokenizer

LEAST_TOKENS = 4  # of a prompt, and of an answer whose length the dataset gives
MOST_PROMPT_TOKENS = 1024
MOST_TOKENS = 2048  # of prompt and answer together


class _Turn(msgspec.Struct, frozen=True):
    value: str = ""


class _Conversation(msgspec.Struct, frozen=True):
    conversations: tuple[_Turn, ...] = ()


def sharegpt(
    path: Path, tokenizer: Tokenizer, *, count: int, output_len: int | None, seed: int
) -> Workload:
    """Read at most `count` requests, in an order drawn with `seed`. `output_len` replaces the
    answers' lengths. Raise CommandError if the file has no usable conversation."""
    pairs = _read(path)
    random.Random(seed).shuffle(pairs)
    items = []
    for item in _usable(pairs, tokenizer, output_len):
        items.append(item)
        if len(items) == count:
            break
    if not items:
        raise CommandError(
            f"--dataset-path {path} holds no conversation of two turns with at least"
            f" {LEAST_TOKENS} and at most {MOST_TOKENS} tokens"
        )
    return Workload("sharegpt", tuple(items))


def _usable(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, output_len: int | None
) -> Iterator[WorkloadItem]:
    for prompt, answer in pairs:
        ids = tuple(tokenizer.encode(prompt))
        own = len(tokenizer.encode(answer, add_special_tokens=False))
        new = output_len or own
        short = len(ids) < LEAST_TOKENS or new < (LEAST_TOKENS if output_len is None else 1)
        if not (short or len(ids) > MOST_PROMPT_TOKENS or len(ids) + new > MOST_TOKENS):
            yield WorkloadItem(ids, new)


def _read(path: Path) -> list[tuple[str, str]]:
    """Return the first two turns of each conversation with at least two."""
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except (OSError, msgspec.MsgspecError) as error:
        raise CommandError(f"--dataset-path {path}: {error}") from error
    turns = [conversation.conversations for conversation in conversations]
    return [
        (conversation[0].value, conversation[1].value)
        for conversation in turns
        if len(conversation) >= 2
    ]

"""Tokenizes for many requests at once: what comes in the same turn of the event loop is a batch.

In: texts. Out: their ids. The library encodes a batch on all cores, and with less work for each
text. A batch is a few short texts, and the loop serves others between two; a long text has a thread
of its own, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from baton_text.tokenizer import LONG_TEXT, Tokenizer

Ids = list[int]
Wanted = tuple[str, asyncio.Future[Ids]]


class Encoder:
    """`special`: whether the tokenizer adds what it puts around a text."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._waiting: deque[Wanted] = deque()

    async def encode(self, text: str) -> Ids:
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.encode, text, self._special)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._batch)
        future: asyncio.Future[Ids] = loop.create_future()
        self._waiting.append((text, future))
        return await future

    def _batch(self) -> None:
        """At least one text, and no more than take the loop some milliseconds."""
        batch: list[Wanted] = []
        room = LONG_TEXT
        while self._waiting and room >= len(self._waiting[0][0]):
            batch.append(self._waiting.popleft())
            room -= len(batch[-1][0])
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._batch)
        found = self._ids([text for text, _ in batch])
        for (_, future), ids in zip(batch, found, strict=True):
            if future.done():
                continue  # its client has left
            if isinstance(ids, Exception):
                future.set_exception(ids)
            else:
                future.set_result(ids)

    def _ids(self, texts: Sequence[str]) -> list[Ids | Exception]:
        """A text that cannot be encoded fails nobody else's."""
        try:
            return [*self._tokenizer.encode_batch(texts, self._special)]
        except Exception as error:
            if len(texts) == 1:
                return [error]
        return [ids for text in texts for ids in self._ids([text])]

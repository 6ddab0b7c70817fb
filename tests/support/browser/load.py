"""Clients that stream chats from a pool until they are stopped, so that a page has something to
show. They repeat their beginnings, which caches then have."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from types import TracebackType
from typing import Self

from tests.support.clients.http import events

CHATS = "/v1/chat/completions"
BEGINNING = "The pool keeps the KV of this long beginning, as many requests have it. " * 3
END_S = 120.0


class Load:
    """`with Load(url, 4):` keeps 4 chats of `tokens` tokens running."""

    def __init__(
        self, url: str, chats: int, tokens: int = 60, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url, self._tokens, self._headers = url, tokens, headers
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._chat, args=(number,)) for number in range(chats)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(END_S)

    def _chat(self, number: int) -> None:
        turn = 0
        while not self._ending.is_set():
            turn += 1
            content = f"{BEGINNING}Chat {number}, turn {turn}: " + "what is next? " * (turn % 7)
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": self._tokens}
            with closing(events(self._url, CHATS, body, self._headers)) as stream:
                for _ in stream:
                    if self._ending.is_set():
                        break

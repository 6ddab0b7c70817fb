"""DNS lookups of indexes, for all pools of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from baton_operator.kube.egress import Address, look_up

LOOKUPS = 4  # concurrent DNS lookups


class Lookups:
    """DNS lookups for all pools of one event loop. `resolve` returns the addresses of a host; it
    may block and runs in a thread."""

    def __init__(self, resolve: Callable[[str, int], tuple[Address, ...]] = look_up) -> None:
        self._resolve = resolve
        # Separate threads: a slow DNS server would block the event loop's default executor.
        self._threads = ThreadPoolExecutor(LOOKUPS, "index-lookup")
        self._running: dict[str, Future[tuple[Address, ...]]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(LOOKUPS)

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """Wait until this namespace may read an index. One read per namespace runs at a time, and
        at most LOOKUPS in total, so that a namespace whose indexes hang blocks no other."""
        turn = self._turns.setdefault(namespace, asyncio.Lock())
        async with turn, self._slots:
            yield

    async def addresses(self, namespace: str, host: str, port: int) -> tuple[Address, ...]:
        """Resolve a host. One lookup per namespace runs at a time: a lookup cannot be cancelled,
        and a name server may never answer. Raise TimeoutError while an earlier one still runs."""
        running = self._running.get(namespace)
        if running is not None and not running.done():
            raise TimeoutError("an earlier DNS lookup for this namespace is still running")
        running = self._threads.submit(self._resolve, host, port)
        self._running[namespace] = running
        addresses = await asyncio.wrap_future(running)
        if self._running.get(namespace) is running:
            del self._running[namespace]
        return addresses

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

"""The newest snapshot of a pool, read in a thread.

In: a router. Out: the last Snapshot, and why there is no newer one. A stream that ends is opened
again after a second: the router may restart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from types import TracebackType
from typing import Self

import msgspec

from baton_cli.errors import CommandError
from baton_cli.terminal.remote_router import EventStream, RemoteRouter
from baton_router.live.records import Snapshot

PATH = "/pool/events"
AGAIN_S = 1.0
FIRST_S = 30.0


def snapshots(stream: EventStream) -> Iterator[Snapshot]:
    """Raise CommandError if the stream breaks or holds something else."""
    decoder = msgspec.json.Decoder(Snapshot)
    for data in stream:
        try:
            yield decoder.decode(data)
        except msgspec.DecodeError as error:
            raise CommandError(
                f"the router's snapshot cannot be read ({error}); use the `baton` of the router's"
                " version"
            ) from error


class PoolFeed:
    """`with PoolFeed(router) as feed:` reads until the block ends. `newest` is None before the
    first snapshot; `problem` is "" while snapshots come."""

    def __init__(self, router: RemoteRouter) -> None:
        self.newest: Snapshot | None = None
        self.problem = ""
        self._router = router
        self._stream: EventStream | None = None
        self._ends = threading.Event()
        self._seen = threading.Event()  # a snapshot, or the problem that there is none
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        """Wait for the first snapshot. Raise CommandError if there is none."""
        self._thread.start()
        if not self._seen.wait(FIRST_S):
            self.problem = f"{self._router.url} sent no snapshot within {FIRST_S:g} s"
        if self.newest is None:
            self._ends.set()
            raise CommandError(self.problem)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        if self._stream is not None:
            self._stream.interrupt()
        self._thread.join(FIRST_S)

    def _read(self) -> None:
        while not self._ends.is_set():
            try:
                self._follow()
                self.problem = "the router ended the stream"
            except CommandError as error:
                self.problem = str(error)
            self._seen.set()
            self._ends.wait(AGAIN_S)

    def _follow(self) -> None:
        with closing(self._router.stream(PATH)) as stream:
            self._stream = stream
            for snapshot in snapshots(stream):
                self.newest, self.problem = snapshot, ""
                self._seen.set()
                if self._ends.is_set():
                    return

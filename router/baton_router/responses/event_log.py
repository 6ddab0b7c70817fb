"""The events of a response that is being made, for clients that read them later.

In: events, as a stream has them. Out: their bytes as one zlib stream that grows, and a reader of
it. Events resemble each other, so their log has a tenth of their bytes. The numbers of a response's
events begin at 0 and have no gaps, so an event's position in the log is its number.
"""

from __future__ import annotations

import threading
import zlib

from baton_router.responses.events import ENDS

LEVEL = 1  # the fastest; the best one saves another third
BLOCK = 1 << 16  # bytes of events that wait for their compression
_END = b"\n\n"  # of an event


class EventLog:
    """The events of one response. Any thread may add some, one at a time. `count`: their number."""

    def __init__(self) -> None:
        self.count = 0
        self._zip = zlib.compressobj(LEVEL)
        self._data = bytearray()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._unflushed = False
        self._lock = threading.Lock()

    def add(self, events: bytes) -> None:
        """Add whole events."""
        if not events:
            return
        with self._lock:
            self.count += events.count(_END)
            self._waiting.append(events)
            self._waiting_bytes += len(events)
            if self._waiting_bytes >= BLOCK:
                self._compress()

    def data(self, start: int = 0) -> bytes:
        """The log from byte `start` on; it ends with a whole event."""
        with self._lock:
            self._compress()
            if self._unflushed:
                self._data += self._zip.flush(zlib.Z_SYNC_FLUSH)
                self._unflushed = False
            return bytes(self._data[start:])

    def _compress(self) -> None:
        if self._waiting:
            self._data += self._zip.compress(b"".join(self._waiting))
            self._waiting, self._waiting_bytes, self._unflushed = [], 0, True


class EventReader:
    """Reads a log piece by piece. `seen` is the number of events that the client has; they are
    skipped. `count` is the number of events so far; `ended`: the last one is a stream's end."""

    def __init__(self, seen: int) -> None:
        self.count = 0
        self.ended = False
        self._seen = seen
        self._unzip = zlib.decompressobj()
        self._rest = b""

    def read(self, piece: bytes) -> bytes:
        """The events of the log's next piece that the client lacks."""
        *events, self._rest = (self._rest + self._unzip.decompress(piece)).split(_END)
        skipped = max(0, self._seen - self.count)
        self.count += len(events)
        if events:
            self.ended = events[-1].startswith(ENDS)
        return b"".join([event + _END for event in events[skipped:]])

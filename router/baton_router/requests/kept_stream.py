"""One stream that any router can continue: its events are numbered, and kept before they are sent.

In: the stream's batches with their events. Out: the same events with `id:` lines, once the index
has what they follow from. If it fails to keep an entry, the promise is over: the stream goes on,
its next event resets the client's last id, and later ones have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.resume_log import FENCED, FIRST_FENCE, KEPT, Claim
from baton_protocol.errors import ErrorRecord, InvalidRequest
from baton_protocol.resume import ResumeEntry, ResumeHead, ResumeState, kept_delta
from baton_router.requests.output_queue import Batch
from baton_router.requests.resume_writer import ResumeWriter

# A stream lives this much longer than the client asked for: renewals come once per second.
GRACE_S = 2.0
# The prompt, the body and the entries of one stream.
MAX_STREAM_BYTES = 8 << 20
TAKEN = ErrorRecord("another call continues this stream", "stream_taken", status=409)
RESET_ID = b"id:\n"

State = Literal["new", "kept", "lost", "taken"]


class KeptStream:
    """`state`: "new" until the index has its head; then "kept" until the promise is over ("lost"),
    or another call continues the stream ("taken").

    `seen` is the number of events that the client has; they are not sent again. `resumed` is what
    happened before, `held` events that can be sent but were not. `cached` says how many tokens of
    the prompt no node had to compute, once the request has ended. `send` writes events to the
    client, or returns False: then they are held. `on_lost` and `on_taken` are called when the
    promise ends."""

    def __init__(
        self,
        writer: ResumeWriter,
        head: ResumeHead,
        *,
        seen: int = 0,
        claim: Claim | None = None,
        resumed: ResumeState | None = None,
    ) -> None:
        self.id = str(head.request.id)
        self.head = head
        self.state: State = "new"
        self.held = b""
        self.resumed = resumed
        self.cached: Callable[[], int | None] = lambda: None
        self.send: Callable[[bytes], bool] = lambda data: False
        self.on_lost: Callable[[], object] = lambda: None
        self.on_taken: Callable[[], object] = lambda: None
        self._writer = writer
        self._seen = seen
        self._count = 0  # events so far
        self._fence = FIRST_FENCE
        self._position = 0
        self._bytes = 0
        self._unkept = 0  # appends without a result
        self._lifetime_ms = int((head.seconds + GRACE_S) * 1000)
        self._prefix = b"id: %b:" % self.id.encode()
        if claim is not None:
            self._fence, self._position = claim.fence, len(claim.entries)
            self._become_kept(claim.size)

    @property
    def fresh(self) -> bool:
        """Whether the stream has no entry yet."""
        return self.state == "kept" and not self._position

    async def begin(self, head: ResumeHead) -> None:
        """Keep how the stream began; again, if that has changed and there is no entry yet."""
        begins = self.state == "new"
        if not begins and head == self.head:
            return
        self.head = head
        data = self._writer.log.encode_head(head)
        if begins and not self._writer.has_room(len(data)):
            self._end("lost")
            return
        try:
            result = await self._writer.log.begin(self.id, self._fence, data, self._lifetime_ms)
        except StoreUnavailable:
            self._end("lost")
            return
        if result != KEPT:
            self._end("taken")
        elif begins:
            self._become_kept(len(data))

    async def keep(self, batch: Batch, data: bytes) -> bytes:
        """The events in `data`, which follow from the batch, and those held before, once they are
        kept. The caller must send them."""
        if batch and self.state == "kept":
            self.keep_soon(batch, b"")
        if self._unkept:
            await self._writer.written()
        return self._take_held() + self.number(data)

    def keep_soon(self, batch: Batch, data: bytes) -> None:
        """As keep(), without waiting: `send` gets the events."""
        cached = self.cached() if batch[-1][1].finish is not None else None
        deltas = [kept_delta(delta) for _, delta in batch]
        self._append(self._writer.log.encode_deltas(deltas, cached), data)

    async def keep_error(self, error: ErrorRecord, data: bytes) -> bytes:
        """The event of an error that ends the stream. One that may pass is not kept: who resumes
        the stream tries again."""
        if error.retryable or self.state != "kept":
            return self._take_held() + data
        if self.resumed is None or self.resumed.error is None:  # else it was kept before
            self._append(self._writer.log.encode(ResumeEntry(error=error)))
            await self._writer.written()
        return self._take_held() + self.number(data)

    def replay(self, data: bytes) -> bytes:
        """The events after those that the client has, of all that are known. Raise InvalidRequest
        for an id that was never sent."""
        unseen = self.number(data)
        assert self.resumed is not None, "a stream that begins has no events"
        if self._seen > self._count and not self.resumed.over:
            raise InvalidRequest(
                f"Last-Event-ID names event {self._seen} of stream {self.id}, which has"
                f" {self._count}; send the id of the last event that arrived",
                param="Last-Event-ID",
            )
        return unseen

    def number(self, data: bytes) -> bytes:
        """The events with their ids, without those that the client has."""
        if not data or self.state != "kept":
            if data and self._count and self.state == "lost":
                self._count = 0
                return RESET_ID + data
            return data
        # Mostly one event, often of one line: finding two bytes takes 0.3 us, one byte less.
        line = data.find(b"\n")
        if data.find(b"\n\n", line) == len(data) - 2:
            self._count += 1
            if self._count <= self._seen:
                return b""
            return b"%b%d\n%b" % (self._prefix, self._count, data)
        events = data.split(b"\n\n")
        events.pop()
        numbered = []
        for event in events:
            self._count += 1
            if self._count > self._seen:
                numbered.append(b"%b%d\n%b\n\n" % (self._prefix, self._count, event))
        return b"".join(numbered)

    def renew(self) -> None:
        self._put(b"", self._position)

    def take(self) -> None:
        self._end("taken")

    def forget(self) -> None:
        """Delete the stream: nobody may resume it."""
        if self.state == "kept":
            self._put(b"", -1)
            self._end("lost")

    def close(self) -> None:
        """The call is over. The index keeps the stream for its lifetime."""
        if self.state == "kept":
            self._writer.retire(self.id, self._bytes, self._lifetime_ms / 1000)

    # --- entries ----------------------------------------------------------------------------------

    def on_result(self, result: int, events: bytes) -> None:
        self._unkept -= 1
        if result != KEPT:
            self._end("taken" if result == FENCED else "lost")
        elif self._bytes > MAX_STREAM_BYTES:
            self.forget()
        if events and self.state != "taken":
            data = self.number(events)
            if self.held or not self.send(data):
                self.held += data

    def _append(self, entry: bytes, events: bytes = b"") -> None:
        """The next entry of a stream that is kept."""
        self._count_bytes(len(entry))
        self._put(entry, self._position, events)
        self._position += 1

    def _put(self, entry: bytes, position: int, events: bytes = b"") -> None:
        self._unkept += 1
        append = (self.id, self._fence, position, self._lifetime_ms, entry)
        self._writer.append(self, append, events)

    def _become_kept(self, size: int) -> None:
        if self.state == "new":
            self.state = "kept"
            self._writer.live[self.id] = self
            self._count_bytes(size)

    def _take_held(self) -> bytes:
        held, self.held = self.held, b""
        return held

    def _count_bytes(self, size: int) -> None:
        self._bytes += size
        self._writer.kept_bytes += size

    def _end(self, state: Literal["lost", "taken"]) -> None:
        if self.state in ("lost", "taken"):
            return
        if self.state == "kept":
            self._writer.retire(self.id, self._bytes, self._lifetime_ms / 1000)
        self.state = state
        if state == "lost":
            self.on_lost()
        else:
            self.on_taken()

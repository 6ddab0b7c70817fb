"""One stream that any router can continue: its events are numbered, and kept.

In: the stream's batches with their events. Out: the same events with `id:` lines. If the index
fails to keep an entry, the promise is over: the stream goes on, its next event resets the client's
last id, and later ones have none.

An event may leave as soon as any router can make it again, byte for byte, with the same number:

- once the index has the deltas that it follows from; or
- at once, if the stream is repeatable: the router that continues it lets the nodes compute what
  the index lacks. Nodes send one delta per token, so the events of a choice are a function of its
  tokens. The index gets the deltas later, many in one entry.

The id of a repeatable stream's event also has a digest of the tokens so far. Who continues the
stream compares it when it comes to the client's last event, so a client gets no token that follows
other tokens than its own, even if a node computes others than before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from baton_kvstore.index.resume_log import BEGIN, DELETE, FENCED, FIRST_FENCE, KEPT, Claim
from baton_protocol.errors import ErrorRecord, InvalidRequest
from baton_protocol.link import Delta
from baton_protocol.resume import (
    NO_TOKENS,
    ResumeEntry,
    ResumeHead,
    ResumeState,
    digest_after,
    is_plain,
)
from baton_router.requests.output_queue import Batch
from baton_router.requests.resume_writer import BEGIN_S, ResumeWriter

# A stream lives this much longer than the client asked for: renewals come once per second.
GRACE_S = 2.0
# The prompt, the body and the entries of one stream.
MAX_STREAM_BYTES = 8 << 20
TAKEN = ErrorRecord("another call continues this stream", "stream_taken", status=409)
RESET_ID = b"id:\n"

State = Literal["new", "kept", "lost", "taken", "closed"]


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event that a client has: its stream, its number (0: none), and for a repeatable
    stream the digest of the tokens up to it."""

    stream: str
    number: int = 0
    digest: int | None = None

    def __str__(self) -> str:
        return f"event {self.number} of stream {self.stream}"


class KeptStream:
    """`state`: "new" until the index has its head; then "kept" until the promise is over ("lost"),
    another call continues the stream ("taken"), or this one ends ("closed").

    `seen` is the last event that the client has; it and those before are not sent again. `resumed`
    is what happened before; `known_tokens` counts the tokens that it or the client has. `held` are
    events that can be sent but were not. `cached` says how many tokens of the prompt no node had to
    compute, once the request has ended. `send` writes events to the client, or returns False: then
    they are held. `on_lost` and `on_taken` are called when the promise ends."""

    def __init__(
        self,
        writer: ResumeWriter,
        head: ResumeHead,
        *,
        seen: LastEvent | None = None,
        claim: Claim | None = None,
        resumed: ResumeState | None = None,
    ) -> None:
        self.id = str(head.request.id)
        self.head = head
        self.repeatable = head.repeatable
        self.state: State = "new"
        self.held = b""
        self.resumed = resumed
        self.known_tokens = 0 if resumed is None else sum(map(len, resumed.outputs))
        self.cached: Callable[[], int | None] = lambda: None
        self.send: Callable[[bytes], bool] = lambda data: False
        self.on_lost: Callable[[], object] = lambda: None
        self.on_taken: Callable[[], object] = lambda: None
        self._writer = writer
        self._seen = seen or LastEvent(self.id)
        self._seen_count = self._seen.number
        self._caught_up = not self._seen_count
        self._count = 0  # events so far
        self._digest = NO_TOKENS
        self._plain = is_plain(head.request.params)
        self._unwritten: list[Delta] = []
        self._ended = False  # the call is over, and deltas are unwritten
        self._fence = FIRST_FENCE
        self._position = 0
        self._begun = bool(self._seen_count)  # the client may have an event
        self._bytes = 0
        self._unkept = 0  # appends without a result
        self._lifetime_ms = int((head.seconds + GRACE_S) * 1000)
        self._prefix = b"id: %b:" % self.id.encode()
        if claim is not None:
            self._fence, self._position = claim.fence, len(claim.entries)
            self._begun |= bool(claim.entries)
            self._become_kept(claim.size)

    @property
    def fresh(self) -> bool:
        """Whether no client has an event yet."""
        return self.state == "kept" and not self._begun

    def pour(self, batch: Batch, encode: Callable[[Batch], bytes]) -> bytes | None:
        """The events of a batch that may leave now, perhaps none; None if the caller must use
        keep(). `encode` makes the events of a batch."""
        if self.state != "kept" or not self._begun or not self._caught_up or self.held:
            return None
        if not self.repeatable:
            self.keep_soon(batch, encode(batch))
            return b""
        for _, delta in batch:
            if not repeats(delta):
                return None
        if len(batch) > 1:
            return b"".join([self.keep_later(item[1], encode([item])) for item in batch])
        # As keep_later() and number(), without their checks: this is done for each token.
        data = encode(batch)
        if not self._unwritten:
            self._writer.write_later(self)
        self._unwritten.append(delta)
        self._digest = digest = digest_after(self._digest, delta.ids)
        if data.find(b"\n") != len(data) - 2:
            return self.number(data)
        self._count = count = self._count + 1
        return self._prefix + b"%d:%x\n" % (count, digest) + data

    async def begin(self, head: ResumeHead) -> None:
        """Keep how the stream began; again, if that has changed and no client has an event."""
        begins = self.state == "new"
        if not begins and head == self.head:
            return
        self.head, self.repeatable = head, head.repeatable
        data = self._writer.log.encode_head(head)
        if begins and not self._writer.has_room(len(data)):
            self._end("lost")
            return
        self._put(data, BEGIN, within_s=BEGIN_S)
        await self._writer.written()
        if begins and self.state == "new":
            self._become_kept(len(data))

    # --- events that wait for the index -----------------------------------------------------------

    async def keep(self, batch: Batch, data: bytes) -> bytes:
        """The events in `data`, which follow from the batch, and those held before, once they are
        kept. The caller must send them. In a repeatable stream, the batch is one delta."""
        self.write_out()
        if self.repeatable:
            for _, delta in batch:
                self._digest = digest_after(self._digest, delta.ids)
        if batch and self.state == "kept":
            self.keep_soon(batch, b"")
        if self._unkept:
            await self._writer.written()
        return self._take_held() + self.number(data)

    def keep_soon(self, batch: Batch, data: bytes) -> None:
        """As keep(), without waiting: `send` gets the events."""
        self._append(self._encode([delta for _, delta in batch]), data)

    async def keep_error(self, error: ErrorRecord, data: bytes) -> bytes:
        """The event of an error that ends the stream. One that may pass is not kept: who resumes
        the stream tries again."""
        if self.state == "kept" and self.resumed is not None and self.resumed.error == error:
            return self._take_held() + self.number(data)
        if error.retryable or self.state != "kept" or not self._caught_up:
            return self._take_held() + data
        self.write_out()
        self._append(self._writer.log.encode(ResumeEntry(error=error)))
        await self._writer.written()
        return self._take_held() + self.number(data)

    # --- events of a repeatable stream ------------------------------------------------------------

    def keep_later(self, delta: Delta, data: bytes) -> bytes:
        """The events of one delta, which repeats(). They may leave at once."""
        if self.state == "kept":
            if not self._unwritten:
                self._writer.write_later(self)
                self._begun = True
            self._unwritten.append(delta)
            if not self._caught_up:
                self.known_tokens += 1
        self._digest = digest_after(self._digest, delta.ids)
        return self.number(data)

    def write_out(self) -> None:
        """Send the unwritten deltas to the index."""
        if not self._unwritten:
            return
        deltas, self._unwritten = self._unwritten, []
        if self.state == "kept":
            self._append(self._encode(deltas))
        if self._ended:
            self.close()

    # --- numbers ----------------------------------------------------------------------------------

    def replay(self, data: bytes) -> bytes:
        """The events after those that the client has, of all that are known. Raise InvalidRequest
        for an id that was never sent."""
        unseen = self.number(data)
        assert self.resumed is not None, "a stream that begins has no events"
        if self._seen_count > self._count and not self.resumed.over:
            raise self._never_sent()
        return unseen

    def repeat(self, delta: Delta, data: bytes) -> bytes:
        """As number(), for the events of one delta of a repeatable stream."""
        self._digest = digest_after(self._digest, delta.ids)
        return self.number(data)

    def number(self, data: bytes) -> bytes:
        """The events with their ids, without those that the client has. Raise InvalidRequest if the
        client's last event followed other tokens."""
        if not data or self.state != "kept":
            if data and self._count and self.state == "lost":
                self._count = 0
                return RESET_ID + data
            return data
        # Mostly one event, often of one line: finding two bytes takes 0.3 us, one byte less.
        line = data.find(b"\n")
        if line == len(data) - 2 or data.find(b"\n\n", line) == len(data) - 2:
            self._count += 1
            if not self._caught_up:
                return self._skip()
            # Adding is twice as fast as formatting all.
            if self.repeatable:
                return self._prefix + b"%d:%x\n" % (self._count, self._digest) + data
            return self._prefix + b"%d\n" % self._count + data
        events = data.split(b"\n\n")
        events.pop()
        return b"".join([self.number(event + b"\n\n") for event in events])

    def number_last(self, data: bytes) -> bytes:
        """As number(), for the last events. Raise InvalidRequest if the client names a later
        one."""
        numbered = self.number(data)
        if self.state == "kept" and self._count < self._seen_count:
            raise self._never_sent()
        return numbered

    def _skip(self) -> bytes:
        """Nothing: the client has this event."""
        if self._count == self._seen_count:
            digest = self._digest if self.repeatable else None
            if self._seen.digest != digest:
                raise InvalidRequest(
                    f"Last-Event-ID names {self._seen}, and the tokens before that event are not"
                    " those that the nodes compute; send the request again",
                    param="Last-Event-ID",
                )
            self._caught_up = True
        return b""

    def _never_sent(self) -> InvalidRequest:
        return InvalidRequest(
            f"Last-Event-ID names {self._seen}, which has {self._count}; send the id of the last"
            " event that arrived",
            param="Last-Event-ID",
        )

    # --- the end ----------------------------------------------------------------------------------

    def renew(self) -> None:
        if not self._unwritten:  # else they renew it soon
            self._put(b"", self._position)

    def take(self) -> None:
        self._end("taken")

    def forget(self) -> None:
        """Delete the stream: nobody may resume it."""
        if self.state == "kept":
            self._unwritten.clear()
            self._put(b"", DELETE)
            self._end("lost")

    def close(self) -> None:
        """The call is over. The index keeps the stream for its lifetime."""
        if self._unwritten:
            self._ended = True
        elif self.state == "kept":
            self._retire()
            self.state = "closed"

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

    def _encode(self, deltas: Sequence[Delta]) -> bytes:
        cached = self.cached() if deltas[-1].finish is not None else None
        return self._writer.log.encode(ResumeEntry.of(deltas, plain=self._plain, cached=cached))

    def _append(self, entry: bytes, events: bytes = b"") -> None:
        """The next entry of a stream that is kept."""
        self._begun = True
        self._count_bytes(len(entry))
        self._put(entry, self._position, events)
        self._position += 1

    def _put(self, entry: bytes, position: int, events: bytes = b"", within_s: float = 0.0) -> None:
        self._unkept += 1
        append = (self.id, self._fence, position, self._lifetime_ms, entry)
        self._writer.append(self, append, events, within_s)

    def _become_kept(self, size: int) -> None:
        self.state = "kept"
        self._writer.live[self.id] = self
        self._count_bytes(size)

    def _take_held(self) -> bytes:
        held, self.held = self.held, b""
        return held

    def _count_bytes(self, size: int) -> None:
        self._bytes += size
        self._writer.kept_bytes += size

    def _retire(self) -> None:
        self._writer.retire(self.id, self._bytes, self._lifetime_ms / 1000)

    def _end(self, state: Literal["lost", "taken"]) -> None:
        if self.state not in ("new", "kept"):
            return
        if self.state == "kept":
            self._retire()
        self.state = state
        if state == "lost":
            self.on_lost()
        else:
            self.on_taken()


def repeats(delta: Delta) -> bool:
    """Whether another attempt has the same delta: it is of one token."""
    return len(delta.ids) == 1

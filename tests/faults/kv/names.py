"""Rows of the KV fault matrix: KV that is somebody else's, or somebody's former self's; clocks.

In: nothing. Out: FAULTS. Each foreign chunk is offered twice: as it is, when nobody may find it,
and copied under the name that is asked for, when its header gives it away.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from baton_engine.sim.build import build_sim
from baton_kvstore.data.chunk_format import chunk_spec, epoch_digest, fingerprint_digest, seal
from baton_kvstore.keys import chunk_key, inbox_key, marker_key
from baton_protocol.ids import BlockId, Epoch, Fingerprint, NodeId
from baton_protocol.layout import VALUE_HEADER_BYTES
from baton_protocol.link import FirstTokens, PrefillJob, RunJob
from baton_protocol.request import Request
from baton_protocol.store import InboxEntry
from tests.faults.kv.cells import (
    Act,
    Cell,
    Deadline,
    Fault,
    everything_fetched,
    lost,
    nothing_fetched,
    stored,
)
from tests.support.kv_faults.stage import CHUNKS, OUTPUTS, SMALL, Stage
from tests.support.stores.kvstore import wait_until

HIT = 5
HOUR_S = 3600.0
# The same bytes for the same tokens, and yet another model.
OLD = replace(SMALL, vocab_size=260)
QUICK = Deadline()


def copy_names(stage: Stage, fingerprint: Fingerprint, request: Request) -> None:
    """Offer another pool's or tenant's chunks of this prompt under the names of the stage's own."""
    theirs = stage.names_of("p0", request)
    with stage.client("index") as index, stage.client("data0") as data:
        for here, there in zip(stage.names(), theirs, strict=True):
            mine = chunk_key(stage.fingerprint, here)
            assert data.copy(chunk_key(fingerprint, there), mine, replace=True)
            assert index.copy(marker_key(fingerprint, there), marker_key(stage.fingerprint, here))


# --- fingerprint and tenant -----------------------------------------------------------------------


def foreign_model(*, copied: bool) -> Act:
    def play(stage: Stage) -> None:
        node = stage.node("p0", OLD)
        fingerprint = node.engine.info.fingerprint
        assert fingerprint != stage.fingerprint
        stage.publish_in_vain(stage.request)
        assert node.published() == CHUNKS
        stage.node("d0")
        stage.strike(lambda s: copy_names(s, fingerprint, s.request) if copied else None)
        stage.run("d0")
        (lost(CHUNKS, "fingerprint") if copied else nothing_fetched)(stage)

    return play


def salted(request: Request, salt: str) -> Request:
    return msgspec.structs.replace(request, salt=salt)


def foreign_tenant(*, copied: bool) -> Act:
    def play(stage: Stage) -> None:
        theirs = salted(stage.request, "their-salt")
        stage.publish(theirs)
        stage.request = salted(stage.request, "my-salt")
        node = stage.node("d0")
        stage.strike(lambda s: copy_names(s, s.fingerprint, theirs) if copied else None)
        stage.run("d0")
        if copied:
            lost(CHUNKS, "chunk hash")(stage)
        else:
            nothing_fetched(stage)
            assert node.loop.counters.matched_blocks == 0
        stage.run("d1", salted(stage.ask("theirs"), "their-salt"))
        assert stage.node("d1").fetched() == CHUNKS

    return play


# --- epochs and attempts --------------------------------------------------------------------------


def former_epoch(stage: Stage) -> None:
    """The prefill job names the decode node's epoch before its restart."""
    request, prefill, decode = stage.request, stage.node("p0"), stage.node("d0")
    before = Epoch("epoch-before")
    decode.take(RunJob(request, await_first=True))
    stage.strike(lambda _: prefill.take(PrefillJob(request, decode.name, before)))
    stage.end_hand_off("p0", "d0")
    nothing_fetched(stage)
    assert not [event for event in decode.events if isinstance(event, InboxEntry)]
    with stage.client("index") as client:
        assert client.xlen(inbox_key("default", decode.name, before)) > 0


def former_writer(stage: Stage) -> None:
    """The chunks of a prefill node that was restarted since are what they were."""
    stage.publish()
    stage.drop("p0")
    stage.strike(lambda _: None)
    stage.hand_off("p1", "d0")
    everything_fetched(stage)
    assert stage.node("p1").published() == 0


def former_attempt(stage: Stage) -> None:
    """Everything that attempt 1 was told arrives once more while attempt 2 runs."""
    decode, old = stage.node("d0"), stage.request
    new = msgspec.structs.replace(old, attempt=2)
    stage.request = new
    decode.take(RunJob(old, await_first=True))
    decode.loop.turn()
    decode.take(RunJob(new, await_first=True))

    def strike(stage: Stage) -> None:
        stage.node("p0").take(PrefillJob(old, decode.name, decode.epoch))
        wrong = tuple(33 for _ in range(3))
        decode.take(FirstTokens(old.id, 1, (wrong,)))
        stage.spin(
            lambda: any(isinstance(e, InboxEntry) and e.kind == "end" for e in decode.events),
            "the old attempt's inbox",
        )
        assert decode.fetched() == 0

    stage.strike(strike)
    stage.node("p1").take(PrefillJob(new, decode.name, decode.epoch))
    stage.end_hand_off("p1", "d0")
    everything_fetched(stage)


# --- duplicates -----------------------------------------------------------------------------------


def two_writers(stage: Stage) -> None:
    """Two prefill nodes compute and put the same chunks at the same time."""
    for name in ("p0", "p1"):
        stage.node(name)
        stage.link(name, "index").hold()
    stage.begin_hand_off("p0", "d0")
    stage.node("p1").take(PrefillJob(stage.request, NodeId("nobody"), Epoch("never")))
    stage.strike(lambda _: None)
    for name in ("p0", "p1"):
        stage.link(name, "index").mend()
    stage.end_hand_off("p0", "d0")
    stage.settle()
    everything_fetched(stage)
    assert [stage.node(name).published() for name in ("p0", "p1")] == [CHUNKS, CHUNKS]


def other_low_bits(stage: Stage) -> None:
    """Another epoch's value of the same chunk, right in itself and other in its low bits, as
    another batch shape gives them: it is taken whole, and alarms nobody."""
    stage.publish()
    key, name = stage.key(HIT), stage.names()[HIT]
    value = bytearray(stage.value(key))
    value[VALUE_HEADER_BYTES::8] = bytes(byte ^ 1 for byte in value[VALUE_HEADER_BYTES::8])
    digest = fingerprint_digest(stage.fingerprint)
    seal([memoryview(value)], chunk_spec(stage.layout, digest, name), epoch_digest(Epoch("other")))
    stage.expect_page(name, bytes(value[VALUE_HEADER_BYTES:]), lambda: tokens_over(stage))
    stage.node("d0")
    stage.strike(lambda s: s.overwrite(key, bytes(value)))
    stage.run("d0")
    everything_fetched(stage)


def tokens_over(stage: Stage) -> list[int]:
    """What an engine says whose pages are those that are expected."""
    engine = build_sim(stage.settings)
    reservation = engine.reserve(stage.request)
    assert reservation is not None
    wanted = stage.expected_pages()
    for block, name in zip(reservation.blocks, reservation.hashes, strict=False):
        engine.memory.write([BlockId(block)], memoryview(wanted[name]))
    engine.submit(stage.request, reservation=reservation, landed=[(0, CHUNKS)])
    ids: list[int] = []
    while len(ids) < OUTPUTS:
        ids += [token.id for token in engine.step().tokens]
    return ids


# --- clocks ---------------------------------------------------------------------------------------


@contextmanager
def wall_clock(by_s: float) -> Iterator[None]:
    """The time of day jumps, for whoever asks Python: the nodes, and the index's clients."""
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + by_s)
        yield


def clock_jump(by_s: float) -> Act:
    """In mid-hand-off, and back before its end; the jump is longer than the time that is left."""

    def play(stage: Stage) -> None:
        for name in ("p0", "d0"):
            stage.node(name)
        stage.request = msgspec.structs.replace(stage.request, time_left=HOUR_S / 2)
        stage.begin_hand_off("p0", "d0")
        stage.spin(lambda: stage.node("d0").fetched() > 0, "the first chunk")
        stage.strike(lambda _: None)
        with wall_clock(by_s):
            stage.spin(lambda: stage.node("d0").fetched() > CHUNKS // 2, "half of the chunks")
        stage.end_hand_off("p0", "d0")
        everything_fetched(stage)

    return play


def past_deadline(stage: Stage) -> None:
    """The time is over while fetches are in flight: an error before the first token, and blocks
    that are held until the fetches have settled."""
    stage.publish()
    node = stage.node("d0")
    request = msgspec.structs.replace(stage.request, time_left=HOUR_S)
    link = stage.link("d0", "data0")
    link.hold()
    node.take(RunJob(request))
    stage.spin(lambda: not node.freed, "a fetch in flight")
    node.clock_ahead_s += 2 * HOUR_S
    stage.spin(lambda: bool(node.failures()), "the end")
    assert not node.freed
    assert [failed.error.code for failed in node.failures()] == ["deadline_exceeded"]
    assert node.ids(request.id) == []
    link.mend()
    stage.settle()


def keys_expire(stage: Stage) -> None:
    """What a server's own clock does that jumps forward: everything has expired."""
    for server in ("index", "data0"):
        with stage.client(server) as client:
            keys = list(client.scan_iter("kv1:*"))
            for key in keys:
                client.pexpire(key, 1)
            assert len(keys) >= CHUNKS
            wait_until(lambda: not client.exists(*keys), "the end of all keys")  # noqa: B023


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="old fingerprint",
        how="a node of another fingerprint published the same prompt; its chunks as they are, and "
        "copied under the names asked for",
        seen="nothing is found; the copies are lost, by the fingerprint in their headers",
        deadline=QUICK,
        cells=(
            Cell(case="as it is", play=foreign_model(copied=False)),
            Cell(case="copied", play=foreign_model(copied=True)),
        ),
    ),
    Fault(
        name="wrong tenant",
        how="another salt's chunks of the same prompt; as they are, and copied",
        seen="matched and fetched 0 for the one tenant, everything for the other; the copies are "
        "lost, by the hash in their headers",
        deadline=QUICK,
        cells=(
            Cell(case="as it is", play=foreign_tenant(copied=False)),
            Cell(case="copied", play=foreign_tenant(copied=True)),
        ),
    ),
    Fault(
        name="old epoch",
        how="announcements to the decode node's former epoch; a writer restarted since; all that "
        "attempt 1 was told, while attempt 2 runs",
        seen="nobody hears the first, the chunks of the second are used, the third is dropped",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(case="inbox", play=former_epoch),
            Cell(case="writer", play=former_writer),
            Cell(case="attempt", play=former_attempt),
        ),
    ),
    Fault(
        name="duplicate writer",
        how="two prefill nodes put the same chunks at once; a value of another epoch with other "
        "low bits replaces one after its marker",
        seen="everything is fetched, nothing lost; the page is the second writer's whole value",
        deadline=QUICK,
        cells=(
            Cell(case="at once", play=two_writers),
            Cell(case="other low bits", play=other_low_bits),
        ),
    ),
    Fault(
        name="clock jump",
        how="the nodes' time of day jumps an hour forth or back in mid-hand-off, and returns; "
        "the request's time is over; every key expires as under a server's clock that jumped",
        seen="everything is fetched; past the deadline an error before the first token; what "
        "expired is not found",
        deadline=QUICK,
        cells=(
            Cell(case="forth", play=clock_jump(HOUR_S)),
            Cell(case="back", play=clock_jump(-HOUR_S), long=True),
            Cell(case="past the deadline", play=past_deadline),
            Cell(case="server's", play=stored(keys_expire, nothing_fetched)),
        ),
    ),
)

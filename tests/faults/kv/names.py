"""Rows of the KV fault matrix: KV of other models, tenants, epochs and attempts; wrong clocks.

In: nothing. Out: FAULTS. Chunks of another model or tenant are tested twice: unchanged, so that no
lookup may find them; and copied to the keys of the request, where their headers must expose them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from baton_kvstore.data.chunk_format import chunk_spec, epoch_digest, fingerprint_digest, seal
from baton_kvstore.keys import chunk_key, inbox_key, marker_key
from baton_protocol.ids import BlockId, Epoch, Fingerprint, NodeId
from baton_protocol.layout import VALUE_HEADER_BYTES
from baton_protocol.link import FirstTokens, PrefillJob, RunJob
from baton_protocol.request import Request
from baton_protocol.store import InboxEntry
from tests.faults.kv.cells import (
    Action,
    Cell,
    Deadline,
    Fault,
    all_fetched,
    lost,
    nothing_fetched,
    stored,
)
from tests.support.kv_faults.kinds import KINDS, EngineSettings, build_engine
from tests.support.kv_faults.testbed import CHUNKS, OUTPUTS, SMALL, TARGET, KVTestbed
from tests.support.stores.kvstore import wait_until

HOUR_S = 3600.0
# Another fingerprint, although the same tokens have the same KV bytes.
OTHER_MODEL = replace(SMALL, vocab_size=260)
QUICK = Deadline()


def copy_chunks(testbed: KVTestbed, fingerprint: Fingerprint, request: Request) -> None:
    """Copy another model's or tenant's chunks of this prompt to the keys of the testbed's
    request."""
    foreign = testbed.names_of("p0", request)
    first = testbed.travelling().start
    with testbed.client("index") as index, testbed.client("data0") as data:
        for own_name, foreign_name in zip(testbed.names()[first:], foreign[first:], strict=True):
            own_key = chunk_key(testbed.fingerprint, own_name)
            assert data.copy(chunk_key(fingerprint, foreign_name), own_key, replace=True)
            assert index.copy(
                marker_key(fingerprint, foreign_name), marker_key(testbed.fingerprint, own_name)
            )


# --- fingerprint and tenant -----------------------------------------------------------------------


def foreign_model(*, copied: bool, other: EngineSettings = OTHER_MODEL) -> Action:
    def run(testbed: KVTestbed) -> None:
        node, chunks = testbed.node("p0", other), len(testbed.travelling())
        fingerprint = node.engine.info.fingerprint
        assert fingerprint != testbed.fingerprint
        testbed.try_publish(testbed.request)
        assert node.published() == chunks
        testbed.node("d0")
        testbed.inject(lambda s: copy_chunks(s, fingerprint, s.request) if copied else None)
        testbed.run("d0")
        (lost(chunks, "fingerprint") if copied else nothing_fetched)(testbed)

    return run


def salted(request: Request, salt: str) -> Request:
    return msgspec.structs.replace(request, salt=salt)


def foreign_tenant(*, copied: bool) -> Action:
    def run(testbed: KVTestbed) -> None:
        foreign = salted(testbed.request, "foreign-salt")
        testbed.publish(foreign)
        testbed.request = salted(testbed.request, "own-salt")
        node = testbed.node("d0")
        testbed.inject(lambda s: copy_chunks(s, s.fingerprint, foreign) if copied else None)
        testbed.run("d0")
        if copied:
            lost(CHUNKS, "chunk hash")(testbed)
        else:
            nothing_fetched(testbed)
            assert node.loop.counters["matched_blocks"] == 0
        testbed.run("d1", salted(testbed.make_request("foreign"), "foreign-salt"))
        assert testbed.node("d1").fetched() == CHUNKS

    return run


# --- epochs and attempts --------------------------------------------------------------------------


def announce_to_former_epoch(testbed: KVTestbed) -> None:
    """Send a prefill job that names the decode node's epoch before its restart."""
    request, prefill, decode = testbed.request, testbed.node("p0"), testbed.node("d0")
    before = Epoch("epoch-before")
    decode.take(RunJob(request, await_first=True))
    testbed.inject(lambda _: prefill.take(PrefillJob(request, decode.name, before)))
    testbed.end_hand_off("p0", "d0")
    nothing_fetched(testbed)
    assert not [event for event in decode.events if isinstance(event, InboxEntry)]
    with testbed.client("index") as client:
        assert client.xlen(inbox_key("default", decode.name, before)) > 0


def restart_writer(testbed: KVTestbed) -> None:
    """Hand off a prompt whose chunks were published by a prefill node that has restarted since."""
    testbed.publish()
    testbed.drop("p0")
    testbed.inject(lambda _: None)
    testbed.hand_off("p1", "d0")
    all_fetched(testbed)
    assert testbed.node("p1").published() == 0


def replay_former_attempt(testbed: KVTestbed) -> None:
    """Send all frames and entries of attempt 1 once more while attempt 2 runs."""
    decode, old = testbed.node("d0"), testbed.request
    new = msgspec.structs.replace(old, attempt=2)
    testbed.request = new
    decode.take(RunJob(old, await_first=True))
    decode.loop.turn()
    decode.take(RunJob(new, await_first=True))

    def inject(testbed: KVTestbed) -> None:
        testbed.node("p0").take(PrefillJob(old, decode.name, decode.epoch))
        wrong = tuple(33 for _ in range(3))
        decode.take(FirstTokens(old.id, 1, (wrong,)))
        testbed.spin(
            lambda: any(isinstance(e, InboxEntry) and e.kind == "end" for e in decode.events),
            "the old attempt's inbox",
        )
        assert decode.fetched() == 0

    testbed.inject(inject)
    testbed.node("p1").take(PrefillJob(new, decode.name, decode.epoch))
    testbed.end_hand_off("p1", "d0")
    all_fetched(testbed)


# --- duplicates -----------------------------------------------------------------------------------


def two_writers(testbed: KVTestbed) -> None:
    """Let two prefill nodes compute and put the same chunks at the same time."""
    for name in ("p0", "p1"):
        testbed.node(name)
        testbed.link(name, "index").hold()
    testbed.begin_hand_off("p0", "d0")
    testbed.node("p1").take(PrefillJob(testbed.request, NodeId("nobody"), Epoch("never")))
    testbed.inject(lambda _: None)
    for name in ("p0", "p1"):
        testbed.link(name, "index").mend()
    testbed.end_hand_off("p0", "d0")
    testbed.settle()
    all_fetched(testbed)
    assert [testbed.node(name).published() for name in ("p0", "p1")] == [CHUNKS, CHUNKS]


def other_low_bits(testbed: KVTestbed) -> None:
    """Replace a value by a valid one of another epoch that differs in its low bits, as another
    batch shape computes it. It must be used whole and not count as corrupt."""
    testbed.publish()
    key, name = testbed.key(TARGET), testbed.names()[TARGET]
    value = bytearray(testbed.value(key))
    value[VALUE_HEADER_BYTES::8] = bytes(byte ^ 1 for byte in value[VALUE_HEADER_BYTES::8])
    digest = fingerprint_digest(testbed.fingerprint)
    seal(
        [memoryview(value)], chunk_spec(testbed.layout, digest, name), epoch_digest(Epoch("other"))
    )
    testbed.expect_page(
        name, bytes(value[VALUE_HEADER_BYTES:]), lambda: ids_with_expected_pages(testbed)
    )
    testbed.node("d0")
    testbed.inject(lambda s: s.overwrite(key, bytes(value)))
    testbed.run("d0")
    all_fetched(testbed)


def ids_with_expected_pages(testbed: KVTestbed) -> list[int]:
    """Return the ids of an engine whose pages are the expected ones."""
    engine = build_engine(testbed.settings)
    reservation = engine.reserve(testbed.request)
    assert reservation is not None
    expected = testbed.expected_pages()
    for block, name in zip(reservation.blocks, reservation.hashes, strict=False):
        engine.memory.write([BlockId(block)], memoryview(expected[name]))
    engine.submit(testbed.request, reservation=reservation, landed=[(0, CHUNKS)])
    ids: list[int] = []
    while len(ids) < OUTPUTS:
        ids += [token.id for token in engine.step().tokens]
    return ids


# --- clocks ---------------------------------------------------------------------------------------


@contextmanager
def wall_clock(by_s: float) -> Iterator[None]:
    """Change the wall clock of this process, which the nodes and the index's clients read."""
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + by_s)
        yield


def clock_jump(by_s: float) -> Action:
    """Change the clock during a hand-off, and back before its end, by more than the request's time
    left."""

    def run(testbed: KVTestbed) -> None:
        for name in ("p0", "d0"):
            testbed.node(name)
        testbed.request = msgspec.structs.replace(testbed.request, time_left=HOUR_S / 2)
        testbed.begin_hand_off("p0", "d0")
        testbed.spin(lambda: testbed.node("d0").fetched() > 0, "the first chunk")
        testbed.inject(lambda _: None)
        with wall_clock(by_s):
            testbed.spin(lambda: testbed.node("d0").fetched() > CHUNKS // 2, "half of the chunks")
        testbed.end_hand_off("p0", "d0")
        all_fetched(testbed)

    return run


def past_deadline(testbed: KVTestbed) -> None:
    """The deadline passes while fetches are in flight: the request fails before its first token,
    and its blocks are held until the fetches have settled."""
    testbed.publish()
    node = testbed.node("d0")
    request = msgspec.structs.replace(testbed.request, time_left=HOUR_S)
    link = testbed.link("d0", "data0")
    link.hold()
    node.take(RunJob(request))
    testbed.spin(lambda: not node.freed, "a fetch in flight")
    node.clock_ahead_s += 2 * HOUR_S
    testbed.spin(lambda: bool(node.failures()), "the end")
    assert not node.freed
    assert [failed.error.code for failed in node.failures()] == ["deadline_exceeded"]
    assert node.ids(request.id) == []
    link.mend()
    testbed.settle()


def keys_expire(testbed: KVTestbed) -> None:
    """Let all keys expire, as they do if a server's clock jumps forward."""
    for server in ("index", "data0"):
        with testbed.client(server) as client:
            keys = list(client.scan_iter("kv1:*"))
            for key in keys:
                client.pexpire(key, 1)
            assert len(keys) >= CHUNKS
            wait_until(lambda: not client.exists(*keys), "the end of all keys")  # noqa: B023


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="old fingerprint",
        how="a node of another fingerprint published the same prompt; its chunks unchanged, and "
        "copied to the request's keys",
        checks="nothing is found; the copies are lost, since their headers have another "
        "fingerprint",
        deadline=QUICK,
        cells=(
            Cell(case="unchanged", run=foreign_model(copied=False)),
            Cell(case="copied", run=foreign_model(copied=True)),
            *(
                Cell(
                    case=f"copied, {kind}",
                    run=foreign_model(copied=True, other=replace(settings, other_weights=True)),
                    settings=settings,
                    long=True,
                )
                for kind, settings in KINDS.items()
            ),
        ),
    ),
    Fault(
        name="wrong tenant",
        how="chunks of the same prompt with another tenant's salt; unchanged, and copied",
        checks="one tenant matches and fetches nothing, the other everything; the copies are lost, "
        "since their headers have another chunk hash",
        deadline=QUICK,
        cells=(
            Cell(case="unchanged", run=foreign_tenant(copied=False)),
            Cell(case="copied", run=foreign_tenant(copied=True)),
        ),
    ),
    Fault(
        name="old epoch",
        how="announcements to the decode node's former epoch; chunks of a writer that has "
        "restarted; the frames and entries of attempt 1 while attempt 2 runs",
        checks="the first are not read, the second are used, the third are dropped",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(case="inbox", run=announce_to_former_epoch),
            Cell(case="writer", run=restart_writer),
            Cell(case="attempt", run=replay_former_attempt),
        ),
    ),
    Fault(
        name="duplicate writer",
        how="two prefill nodes put the same chunks at once; a value of another epoch with other "
        "low bits replaces one after its marker was written",
        checks="all chunks are fetched, none is lost; the page is the second writer's whole value",
        deadline=QUICK,
        cells=(
            Cell(case="at once", run=two_writers),
            Cell(case="other low bits", run=other_low_bits),
        ),
    ),
    Fault(
        name="clock jump",
        how="the nodes' wall clock jumps an hour forward or back during a hand-off, and returns; "
        "the request's deadline passes; every key expires, as if a server's clock had jumped",
        checks="all chunks are fetched; after the deadline the request fails before its first "
        "token; expired chunks are not found",
        deadline=QUICK,
        cells=(
            Cell(case="forward", run=clock_jump(HOUR_S)),
            Cell(case="back", run=clock_jump(-HOUR_S), long=True),
            Cell(case="past the deadline", run=past_deadline),
            Cell(case="server's", run=stored(keys_expire, nothing_fetched)),
        ),
    ),
)

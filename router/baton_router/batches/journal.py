"""What the store holds of batches: their orders, their progress, their answers, their ends.

    queue/BATCH                     the tenant of a batch that has not ended
    batches/TENANT/BATCH/order      what the client asked for
    batches/TENANT/BATCH/begun      its lines were checked, and are being answered
    batches/TENANT/BATCH/cancelled  the client cancels it
    batches/TENANT/BATCH/finishing  no more lines are answered; the files are written
    batches/TENANT/BATCH/ending     how it ends
    batches/TENANT/BATCH/end        the same, once clients find its files
    parts/BATCH/PART                some answers, as lines of NUMBER, 1 or 0 for success, and JSON

Each object is created once and never changed, so routers that work on one batch at the same time,
because one was thought dead, cannot undo each other's work: the first ending counts, and of two
answers to one line the first part's.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from baton_protocol.errors import InvalidRequest, NotFound, Saturated
from baton_router.batches.files import Files, decode, is_id, new_id, read_all, tenant_folder
from baton_router.batches.object_store import ObjectStore
from baton_router.batches.records import (
    Batch,
    BatchEnd,
    BatchErrors,
    BatchMoment,
    BatchOrder,
    BatchStatus,
    RequestCounts,
)

Moment = Literal["begun", "cancelled", "finishing"]
MAX_OPEN = 100  # batches of one tenant that have not ended
LATE_S = 86_400.0
KEPT_S = 30 * 86_400  # a batch that has ended stays in the list for this long


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line of the input. `json` is its line of an output file."""

    number: int
    succeeded: bool
    json: bytes


@dataclass(frozen=True, slots=True)
class BatchState:
    """What the store holds of one batch, but for its answers."""

    order: BatchOrder
    begun: BatchMoment | None
    cancelled: BatchMoment | None
    finishing: BatchMoment | None
    ending: BatchEnd | None
    end: BatchEnd | None

    @property
    def status(self) -> BatchStatus:
        if self.end is not None:
            return self.end.status
        if self.cancelled is not None:
            return "cancelling"
        if self.finishing is not None:
            return "finalizing"
        return "validating" if self.begun is None else "in_progress"


class Journal:
    """The batches in a store. `now` returns Unix seconds."""

    def __init__(self, store: ObjectStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._tenants: dict[str, str] = {}  # of open batches

    # --- for clients ------------------------------------------------------------------------------

    async def add(
        self,
        tenant: str,
        *,
        endpoint: str,
        input_file_id: str,
        input_bytes: int,
        window: str,
        window_s: int,
        metadata: dict[str, str] | None,
        output_ttl_s: int,
    ) -> Batch:
        """Queue a batch. Raise Saturated for a tenant with MAX_OPEN open ones."""
        folder = tenant_folder(tenant)
        waiting = [owner for owner in (await self.open_batches()).values() if owner == tenant]
        if len(waiting) >= MAX_OPEN:
            raise Saturated(
                f"{len(waiting)} of this tenant's batches have not ended; send the next one when "
                "one has",
                code="too_many_batches",
                retry_after=60.0,
            )
        now = int(self._now())
        order = BatchOrder(
            id=new_id("batch_", self._now()),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            input_bytes=input_bytes,
            completion_window=window,
            metadata=metadata,
            created_at=now,
            expires_at=now + window_s,
            output_ttl_s=output_ttl_s,
        )
        # The order first: a crash between the two leaves a batch that no client knows.
        await self._store.create(f"batches/{folder}/{order.id}/order", msgspec.json.encode(order))
        await self._store.create(f"queue/{order.id}", tenant.encode())
        return await self.describe(BatchState(order, None, None, None, None, None))

    async def find(self, tenant: str, id: str) -> BatchState:
        """Raise NotFound for an unknown batch, and for another tenant's."""
        state = await self.read(tenant, id) if is_id(id, "batch_") else None
        if state is None:
            raise NotFound(f"batch {id[:64]!r} does not exist; GET /v1/batches lists yours")
        return state

    async def ids(self, tenant: str) -> list[str]:
        """The ids of the tenant's batches, the newest first."""
        stored = await self._store.list_objects(f"batches/{tenant_folder(tenant)}")
        return sorted({each.key.split("/")[2] for each in stored}, reverse=True)

    async def describe_all(self, tenant: str, ids: Sequence[str]) -> list[Batch]:
        states = await read_all(lambda id: self.read(tenant, id), ids)
        return [await self.describe(state) for state in states if state is not None]

    async def cancel(self, state: BatchState) -> None:
        """Raise InvalidRequest for a batch that has ended otherwise."""
        if state.end is not None and state.end.status != "cancelled":
            raise InvalidRequest(
                f"the batch is {state.end.status}; only one that has not ended can be cancelled"
            )
        if state.end is None:
            await self.note(state.order, "cancelled")

    async def describe(self, state: BatchState) -> Batch:
        """What clients see of a batch."""
        order, end, counts = state.order, state.end, await self._counts(state)

        def at(status: BatchStatus) -> int | None:
            return end.at if end is not None and end.status == status else None

        def since(moment: BatchMoment | None) -> int | None:
            return moment.at if moment is not None else None

        errors = list(end.errors) if end is not None else []
        return Batch(
            id=order.id,
            object="batch",
            endpoint=order.endpoint,
            errors=BatchErrors(object="list", data=errors) if errors else None,
            input_file_id=order.input_file_id,
            completion_window=order.completion_window,
            status=state.status,
            output_file_id=end.output.id if end is not None and end.output else None,
            error_file_id=end.error.id if end is not None and end.error else None,
            created_at=order.created_at,
            in_progress_at=since(state.begun),
            expires_at=order.expires_at,
            finalizing_at=since(state.finishing),
            completed_at=at("completed"),
            failed_at=at("failed"),
            expired_at=at("expired"),
            cancelling_at=since(state.cancelled),
            cancelled_at=at("cancelled"),
            request_counts=counts,
            metadata=order.metadata,
        )

    # --- for routers ------------------------------------------------------------------------------

    async def open_batches(self) -> dict[str, str]:
        """The tenants of the batches that have not ended, by id, the oldest first."""
        ids = [each.key.partition("/")[2] for each in await self._store.list_objects("queue")]
        known = {id: self._tenants[id] for id in ids if id in self._tenants}
        new = [id for id in ids if id not in known]
        tenants = await read_all(lambda id: self._store.read(f"queue/{id}"), new)
        for id, tenant in zip(new, tenants, strict=True):
            if tenant is not None:
                known[id] = tenant.decode()
        self._tenants = known
        return dict(sorted(known.items()))

    async def read(self, tenant: str, id: str) -> BatchState | None:
        folder = f"batches/{tenant_folder(tenant)}/{id}"
        stored = {each.key.rpartition("/")[2] for each in await self._store.list_objects(folder)}

        async def read(name: str) -> bytes | None:
            return await self._store.read(f"{folder}/{name}") if name in stored else None

        order = await read("order")
        if order is None:
            return None
        begun, cancelled, finishing = [
            None if value is None else decode(value, BatchMoment)
            for value in [await read(name) for name in get_args(Moment)]
        ]
        ending, end = [
            None if value is None else decode(value, BatchEnd)
            for value in [await read(name) for name in ("ending", "end")]
        ]
        return BatchState(decode(order, BatchOrder), begun, cancelled, finishing, ending, end)

    async def note(self, order: BatchOrder, moment: Moment, total: int = 0) -> None:
        """Note that a batch has reached this moment, unless it did before."""
        record = BatchMoment(at=int(self._now()), total=total)
        await self._store.create(f"{_folder(order)}/{moment}", msgspec.json.encode(record))

    async def is_cancelled(self, order: BatchOrder) -> bool:
        return await self._store.read(f"{_folder(order)}/cancelled") is not None

    async def keep_answers(self, order: BatchOrder, answers: Sequence[LineAnswer]) -> None:
        """Write answers durably, all or none."""
        succeeded = sum(answer.succeeded for answer in answers)
        time_ms = int(self._now() * 1000)
        name = f"{time_ms:012x}-{succeeded}-{len(answers) - succeeded}-{secrets.token_hex(6)}"
        data = b"".join(
            b"%d %d %b\n" % (answer.number, answer.succeeded, answer.json) for answer in answers
        )
        await self._store.create(f"parts/{order.id}/{name}", data)

    async def parts(self, order: BatchOrder) -> list[str]:
        """The keys of the parts, in an order that stays."""
        return [each.key for each in await self._store.list_objects(f"parts/{order.id}")]

    async def answers(self, parts: Sequence[str]) -> AsyncIterator[LineAnswer]:
        """The answers of these parts, one per line of the input: the first."""
        seen: set[int] = set()
        for part in parts:
            for record in (await self._store.read(part) or b"").split(b"\n")[:-1]:
                number, succeeded, answer = record.split(b" ", 2)
                if int(number) not in seen:
                    seen.add(int(number))
                    yield LineAnswer(int(number), succeeded == b"1", answer)

    async def end(self, order: BatchOrder, end: BatchEnd) -> BatchEnd:
        """Decide how a batch ends, unless that is decided. Return how it ends; then close it."""
        key = f"{_folder(order)}/ending"
        if await self._store.create(key, msgspec.json.encode(end)):
            return end
        earlier = await self._store.read(key)
        return end if earlier is None else decode(earlier, BatchEnd)

    async def close(self, order: BatchOrder, end: BatchEnd, files: Files) -> None:
        """Publish the files and the end of a batch, and forget its parts. Idempotent."""
        for file in (end.output, end.error):
            if file is not None:
                await files.publish(order.tenant, file)
        await self._store.create(f"{_folder(order)}/end", msgspec.json.encode(end))
        for part in await self.parts(order):
            await self._store.delete(part)
        await self.forget(order.id)

    async def forget(self, id: str) -> None:
        """Take a batch from the queue."""
        await self._store.delete(f"queue/{id}")

    async def sweep(self) -> None:
        """Delete batches that ended long ago, and parts of batches that have ended."""
        waiting = await self.open_batches()
        for each in await self._store.list_objects("parts"):
            # A batch may have come since the queue was read: its parts are new.
            if each.key.split("/")[1] not in waiting and each.changed < self._now() - LATE_S:
                await self._store.delete(each.key)
        for each in await self._store.list_objects("batches"):
            id = each.key.split("/")[2]
            if id not in waiting and each.changed < self._now() - KEPT_S:
                await self._store.delete(each.key)

    async def _counts(self, state: BatchState) -> RequestCounts:
        if state.end is not None:
            return state.end.counts
        if state.begun is None:
            return RequestCounts(total=0, completed=0, failed=0)
        numbers = [part.rpartition("/")[2].split("-") for part in await self.parts(state.order)]
        return RequestCounts(
            total=state.begun.total,
            completed=min(state.begun.total, sum(int(one[1]) for one in numbers)),
            failed=min(state.begun.total, sum(int(one[2]) for one in numbers)),
        )


def _folder(order: BatchOrder) -> str:
    return f"batches/{tenant_folder(order.tenant)}/{order.id}"

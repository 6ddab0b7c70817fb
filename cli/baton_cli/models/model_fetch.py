"""The fetch of one model into a folder, once for all processes that share the folder.

In: a hub's model, a folder, an index (optional). Out: a complete folder; progress in the log and,
if an index is given, FetchReports there. The fetch continues while the index is down.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton_cli.errors import CommandError
from baton_cli.models.download_state import DownloadFolder, WantedFiles
from baton_cli.models.hub_client import PAUSES_S, Hub, open_session
from baton_cli.options.sizes import about_size
from baton_engine.errors import WeightsError
from baton_engine.weights.digest import keep_digests
from baton_kvstore.errors import StoreError
from baton_protocol.ids import NodeId
from baton_protocol.model_source import HubModel
from baton_protocol.store import FetchReport

if TYPE_CHECKING:
    from baton_kvstore.index.registry import Registry

LINE_S = 5.0
REPORT_S = 1.0
REPORT_TTL_S = 5.0
LAST_REPORT_TTL_S = 60.0  # long enough for a reader that polls seldom to see the completed fetch
LOCK_LOOK_S = 0.5
DOWNLOAD_TRIES = 3
RECORDS_BYTES = 1 << 20  # for our own files beside the model's: download state, weight digests

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelFetch:
    """The fetch of one model into one folder. `room` limits the folder's bytes, None does not;
    `pauses_s` are the waits between retries of the hub."""

    model: HubModel
    folder: DownloadFolder
    weights: bool
    room: int | None
    endpoint: str
    token: str
    index_url: str
    pool: str
    node: NodeId
    pauses_s: Sequence[float] = PAUSES_S

    async def run(self) -> None:
        """Return when the folder is complete. Raise CommandError or OSError."""
        async with AsyncExitStack() as stack:
            registry = await self._open_index(stack)
            watching = asyncio.create_task(self._report_progress(registry))
            stack.push_async_callback(_end_task, watching)
            began = time.monotonic()
            fetched_here = not self._is_complete() and await self._fetch()
            size = about_size(self.folder.progress()[1])
            took = (
                f"fetched in {time.monotonic() - began:.0f} s"
                if fetched_here
                else "already fetched"
            )
            logger.info("%s: %s, %s, all complete", self.model, size, took)
            await self._announce(registry, LAST_REPORT_TTL_S)

    async def _fetch(self) -> bool:
        """Fetch the model under the folder's lock. Return False if another process completed it
        while this one waited."""
        waits = False
        while True:
            with self.folder.locked() as ours:
                if self._is_complete():
                    return False
                if ours:
                    await self._download()
                    return True
            if not waits:
                logger.info("%s: waiting for another process that fetches it", self.model)
            waits = True
            await asyncio.sleep(LOCK_LOOK_S)

    async def _download(self) -> None:
        """Download, and repeat if files are missing or wrong afterwards: on a volume without
        locks, another fetching process may write to a partial file that this one has taken over."""
        for _ in range(DOWNLOAD_TRIES):
            await self._download_once()
            if self._is_complete():
                return
            logger.warning("%s: another process changed files during the fetch", self.model)
        raise CommandError(
            f"{self.folder.path} lost files of {self.model} in each of {DOWNLOAD_TRIES} "
            "fetches, because another process changes the folder; stop that process, then "
            "fetch again"
        )

    async def _download_once(self) -> None:
        async with open_session(self.token) as session:
            hub = Hub(session, self.endpoint, self.model, self.pauses_s)
            wanted = await hub.list(weights=self.weights)
            self.folder.begin(wanted)
            self._check_room(wanted)
            await hub.download(self.folder, wanted)
        if self.weights:
            await asyncio.to_thread(self._keep_digests)
        self.folder.finish(wanted)

    def _is_complete(self) -> bool:
        return self.folder.complete(weights=self.weights) is not None

    def _keep_digests(self) -> None:
        """Hash the weights and store the digests: a node that can only read the folder would else
        hash all weights at every start. This runs before the completion marker is written, so a
        fetch that is killed here repeats it."""
        logger.info("%s: hashing the weights, once for all nodes", self.model)
        try:
            keep_digests(self.folder.path)
        except WeightsError as error:
            logger.warning("%s: %s", self.model, error)

    def _check_room(self, wanted: WantedFiles) -> None:
        """Raise CommandError if the model exceeds --room or the free disk space."""
        if self.room is not None and wanted.bytes + RECORDS_BYTES > self.room:
            raise CommandError(
                f"{self.model} needs {about_size(wanted.bytes)}, but --room allows "
                f"{about_size(self.room)}: raise --room (in an InferencePool, model.storage)"
            )
        missing = wanted.bytes - self.folder.progress()[0]
        free = shutil.disk_usage(self.folder.path).free
        if missing > free:
            raise CommandError(
                f"{self.folder.path} has {about_size(free)} free, but {self.model} needs "
                f"{about_size(missing)} more: free disk space, or give another --to"
            )

    async def _report_progress(self, registry: Registry | None) -> None:
        """Until cancelled, report to the index every second and to the log every 5 s."""
        line_at, then = time.monotonic(), self.folder.progress()[0]
        while True:
            await self._announce(registry, REPORT_TTL_S)
            await asyncio.sleep(REPORT_S)
            past_s = time.monotonic() - line_at
            if past_s >= LINE_S:
                done, total = self.folder.progress()
                logger.info("%s: %s", self.model, show_progress(done, total, done - then, past_s))
                line_at, then = time.monotonic(), done

    async def _open_index(self, stack: AsyncExitStack) -> Registry | None:
        if not self.index_url:
            return None
        from baton_kvstore.index.registry import Registry

        return await stack.enter_async_context(Registry(self.index_url, self.pool))

    async def _announce(self, registry: Registry | None, ttl_s: float) -> None:
        if registry is None:
            return
        done, total = self.folder.progress()
        report = FetchReport(
            node=self.node, source=str(self.model), done_bytes=done, total_bytes=total
        )
        try:
            await registry.announce_fetch(report, ttl_s)
        except StoreError as error:
            logger.debug("cannot report the progress to the index: %s", error)


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def show_progress(done: int, total: int, new: int, seconds: float) -> str:
    """Format the progress. All sizes are bytes; `new` bytes arrived in the last `seconds`."""
    if not total:
        return "the hub has not reported the size yet"
    rate = max(0, new) / seconds
    left = f", {(total - done) / rate:.0f} s left" if rate else ""
    share = 100 * done // total
    return f"{about_size(done)} of {about_size(total)} ({share} %), {about_size(rate)}/s{left}"

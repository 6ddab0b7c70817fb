"""Tokenizer and chat template of a pool, fetched from its nodes by digest: routers mount no model.

In: a node's report, which names the SHA-256 digests of its artifacts. Out: a PoolModel, built once
per set of digests. Each file is checked against its digest before use.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import aiohttp

from baton_protocol.link import ARTIFACTS_PATH
from baton_protocol.store import NodeReport
from baton_router.nodes.model_grammars import GrammarCounts
from baton_router.nodes.pool_model import PoolModel
from baton_router.settings import Tunables

FETCH_TIMEOUT_S = 30.0
# Seconds without data: other nodes wait for the same model, so a frozen node must not hold them up.
SILENCE_S = 3.0
PIECE_BYTES = 1 << 16
# How many models without nodes are kept in case nodes come back: those used last.
KEPT_UNUSED = 4
Key = tuple[tuple[str, str], ...]


class FetchError(Exception):
    """A node did not serve a file that its report names; the message says which file."""


class TooLargeError(FetchError):
    """A node's files exceed the router's limit."""


class ModelStore:
    """PoolModels by the digests of their files, in order of last use. Concurrent callers share one
    build. The files of one node may have at most `max_bytes` together."""

    def __init__(
        self, session: aiohttp.ClientSession, max_bytes: int = Tunables().max_artifact_bytes
    ) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._models: OrderedDict[Key, asyncio.Task[PoolModel]] = OrderedDict()
        self._forgotten_counts = GrammarCounts()  # counts of forgotten models

    async def fetch_model(self, report: NodeReport, address: str) -> PoolModel:
        """The model of a report, fetched from the node at `address`. Raise FetchError,
        aiohttp.ClientError or TimeoutError; a later call tries again."""
        key = _key(report)
        task = self._models.get(key)
        if task is None:
            task = asyncio.create_task(self._build(report, address))
            self._models[key] = task
        self._models.move_to_end(key)
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._models.get(key) is task:
                del self._models[key]
            raise

    def find_built(self, report: NodeReport) -> PoolModel | None:
        """The model, if it has been built."""
        task = self._models.get(_key(report))
        return _built(task) if task is not None else None

    @property
    def grammar_counts(self) -> GrammarCounts:
        """Counts of all models since the start of the process."""
        return _with_counts(self._forgotten_counts, *map(_built, self._models.values()))

    def forget_unused(self, used: Iterable[NodeReport]) -> None:
        """Keep the models of these nodes and KEPT_UNUSED others."""
        keys = {_key(report) for report in used}
        unused = [key for key in self._models if key not in keys]
        for key in unused[: max(0, len(unused) - KEPT_UNUSED)]:
            task = self._models.pop(key)
            self._forgotten_counts = _with_counts(self._forgotten_counts, _built(task))
            task.cancel()

    async def cancel_builds(self) -> None:
        for task in self._models.values():
            task.cancel()
        await asyncio.gather(*self._models.values(), return_exceptions=True)
        self._models.clear()

    async def _build(self, report: NodeReport, address: str) -> PoolModel:
        names, files, total_bytes = sorted(report.artifacts), [], 0
        for name in names:
            files.append(await self._fetch(report, address, name, self._max_bytes - total_bytes))
            total_bytes += len(files[-1])
        return await asyncio.to_thread(PoolModel.from_files, dict(zip(names, files, strict=True)))

    async def _fetch(self, report: NodeReport, address: str, name: str, max_bytes: int) -> bytes:
        """Fetch one file of at most `max_bytes`."""
        digest = report.artifacts[name]
        url = f"{address}{ARTIFACTS_PATH}{digest}"
        timeout = aiohttp.ClientTimeout(
            total=FETCH_TIMEOUT_S, sock_connect=SILENCE_S, sock_read=SILENCE_S
        )
        # No redirects and no compression: the size limit below counts the bytes received.
        async with self._session.get(
            url,
            timeout=timeout,
            allow_redirects=False,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as response:
            if response.status != 200:
                raise FetchError(f"{name} of {report.node}: {url} answered {response.status}")
            data = bytearray()
            async for chunk in response.content.iter_chunked(PIECE_BYTES):
                data += chunk
                if len(data) > max_bytes:
                    raise TooLargeError(
                        f"the files of {report.node}, including {name}, exceed "
                        f"{self._max_bytes} bytes in total"
                    )
        if hashlib.sha256(data).hexdigest() != digest:
            raise FetchError(f"{name} of {report.node} does not match its digest {digest}")
        return bytes(data)


def _built(task: asyncio.Task[PoolModel]) -> PoolModel | None:
    built = task.done() and not task.cancelled() and task.exception() is None
    return task.result() if built else None


def _with_counts(counts: GrammarCounts, *models: PoolModel | None) -> GrammarCounts:
    for model in models:
        if model is not None:
            counts = counts.plus(model.grammars.counts)
    return counts


def _key(report: NodeReport) -> Key:
    return tuple(sorted(report.artifacts.items()))

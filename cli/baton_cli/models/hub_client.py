"""An HTTP client for a Hugging Face hub: lists a repository and downloads files resumably.

In: a HubModel, the hub's address and optionally a token. Out: `WantedFiles`, and files in a folder.
Failed requests are retried with backoff; a download resets its backoff whenever bytes arrive.
Final failures raise a HubError of one line.

Why not huggingface_hub (2.4): it downloads each file under a name private to the process, so the
partial files of a killed process are neither resumed nor removed; it compares sizes, not digests;
and it gives up at the first 503.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from baton_cli.errors import CommandError
from baton_cli.models.download_state import DownloadFolder, WantedFiles
from baton_engine.config.model_folder import SMALL_FILES
from baton_engine.errors import WeightsError
from baton_engine.weights.safetensors_files import INDEX_NAME, weight_names
from baton_protocol.model_source import HubModel

DEFAULT_ENDPOINT = "https://huggingface.co"
MAIN = "main"
PARALLEL_FILES = 4
CONTENT_TRIES = 2
CHUNK_BYTES = 1 << 20
CONNECT_S = 10.0
SILENCE_S = 30.0
# Waits before each retry. A server's Retry-After may extend a wait up to LONGEST_PAUSE_S.
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
LONGEST_PAUSE_S = 60.0
# A hub that cannot even be connected to is reported after this many retries, in 10 s instead of 40:
# usually its name or the network is wrong. In a pod, Kubernetes tries again.
FIRST_RETRIES = 2

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_BLOB = re.compile(r"[0-9a-f]{40}")


class HubError(CommandError):
    """The hub refuses or cannot deliver the model. The message is one line that says why."""


class _Broken(Exception):
    """A retryable failure. `wait_s` is the server's Retry-After in seconds, 0 if none."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _Lfs(msgspec.Struct, frozen=True):
    sha256: str = ""


class _Sibling(msgspec.Struct, frozen=True):
    """One file of a listing. The blob of a large file is only an LFS pointer; `lfs` describes the
    file itself."""

    rfilename: str
    size: int | None = None
    blob_id: str | None = msgspec.field(default=None, name="blobId")
    lfs: _Lfs | None = None

    @property
    def digest(self) -> str:
        """The file's sha256, or its git blob name, in lower-case hex; "" if the hub gives
        neither."""
        digest = (self.lfs.sha256 if self.lfs is not None else self.blob_id or "").lower()
        return digest if (SHA256 if self.lfs is not None else GIT_BLOB).fullmatch(digest) else ""


class _Listing(msgspec.Struct, frozen=True):
    siblings: tuple[_Sibling, ...] = ()
    sha: str = ""


@dataclass(frozen=True)
class Hub:
    """One repository of one hub. `session` carries the token; the caller closes it."""

    session: aiohttp.ClientSession
    endpoint: str
    model: HubModel
    pauses_s: Sequence[float] = PAUSES_S

    async def list(self, *, weights: bool) -> WantedFiles:
        """List the files of one commit that a node reads. Raise HubError."""
        listing = await self._retried(self._list, unconnected=FIRST_RETRIES)
        commit = listing.sha or self.model.revision or MAIN
        listed = {
            entry.rfilename: entry for entry in listing.siblings if _is_shown(entry.rfilename)
        }
        if "tokenizer.json" not in listed:
            raise HubError(f"{self.model} has no tokenizer.json: Baton cannot serve it")
        # Weights come first, because they take longest.
        names = [*await self._weights(commit, listed)] if weights else []
        names += [
            name for name in listed if any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)
        ]
        return WantedFiles(
            commit=commit,
            files={name: await self._size(commit, listed[name]) for name in names},
            digests={name: listed[name].digest for name in names if listed[name].digest},
            weights=weights,
        )

    async def _weights(self, commit: str, listed: Container[str]) -> Sequence[str]:
        """The weight files that a node reads; repositories also hold weights in other formats."""
        index = None
        if INDEX_NAME in listed:
            index = await self._retried(partial(self._read, commit, INDEX_NAME))
        try:
            names = weight_names(index, f"{INDEX_NAME} of {self.model}")
        except WeightsError as error:
            raise HubError(str(error)) from error
        for name in names:
            if name not in listed:
                raise HubError(
                    f"{self.model} has no {name}: only safetensors checkpoints can be loaded "
                    "(--no-weights fetches the rest, which is enough for the sim engine)"
                )
        return names

    async def _size(self, commit: str, file: _Sibling) -> int:
        if file.size is not None:
            return file.size
        return await self._retried(partial(self._ask_size, commit, file.rfilename))

    async def download(self, folder: DownloadFolder, wanted: WantedFiles) -> None:
        """Download every missing file, a few in parallel. Raise HubError or OSError."""
        few = asyncio.Semaphore(PARALLEL_FILES)

        async def fetch_one(name: str) -> None:
            async with few:
                if not (folder.path / name).exists():
                    await self._download(folder, wanted, name)

        try:
            async with asyncio.TaskGroup() as group:
                for name in wanted.files:
                    group.create_task(fetch_one(name), name=f"fetch {name}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _download(self, folder: DownloadFolder, wanted: WantedFiles, name: str) -> None:
        get = partial(self._get, folder, wanted.commit, name, wanted.files[name])
        for _ in range(CONTENT_TRIES):
            await self._retried(get, partial(folder.have, name))
            if await asyncio.to_thread(folder.settle, name, wanted):
                return
            logger.warning(
                "%s: dropping %s, which does not match the hub's listing", self.model, name
            )
        raise HubError(
            f"{name} of {self.model} again does not match the listing of {self.endpoint} "
            f"({wanted.digests.get(name, '')[:12]}): check the disk, and proxies on the way"
        )

    # --- one try ----------------------------------------------------------------------------------

    async def _list(self) -> _Listing:
        revision = quote(self.model.revision or MAIN, safe="")
        url = f"{self.endpoint}/api/models/{self.model.repository}/revision/{revision}?blobs=true"
        async with self.session.get(URL(url, encoded=True)) as answer:
            self._check(answer)
            body = await answer.read()
        try:
            return msgspec.json.decode(body, type=_Listing)
        except msgspec.MsgspecError as error:
            raise HubError(f"{self.endpoint} is not a hub: it answered {body[:60]!r}") from error

    async def _read(self, commit: str, name: str) -> bytes:
        async with self._open(commit, name, {}) as answer:
            self._check(answer)
            return await answer.read()

    async def _ask_size(self, commit: str, name: str) -> int:
        """Ask for a file's size in bytes, if the hub's listing does not give it."""
        async with self._open(commit, name, {"Range": "bytes=0-0"}) as answer:
            if answer.status == 416:  # an empty file
                return 0
            self._check(answer)
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(total) if total.isdigit() else answer.content_length
        if size is None:
            raise HubError(f"{self.endpoint} does not report the size of {name} of {self.model}")
        return size

    async def _get(self, folder: DownloadFolder, commit: str, name: str, size: int) -> None:
        have = folder.have(name)
        if have >= size and folder.part(name).exists():
            return
        headers = {"Range": f"bytes={have}-"} if have else {}
        async with self._open(commit, name, headers) as answer:
            if answer.status == 416:
                folder.drop(name)
                raise _Broken(f"the hub has no bytes of {name} after {have}")
            self._check(answer)
            # A server that ignores Range sends the whole file.
            have = have if answer.status == 206 else 0
            with folder.part(name).open("ab") as file:
                file.truncate(have)
                async for data in answer.content.iter_chunked(CHUNK_BYTES):
                    have += file.write(data)
        if have > size:
            folder.drop(name)
        if have != size:
            raise _Broken(f"the hub sent {have} bytes of {name} instead of {size}")

    def _open(
        self, commit: str, name: str, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        place = f"{self.model.repository}/resolve/{quote(commit, safe='')}/{quote(name, safe='')}"
        return self.session.get(URL(f"{self.endpoint}/{place}", encoded=True), headers=headers)

    # --- tries ------------------------------------------------------------------------------------

    async def _retried(
        self,
        work: Callable[[], Awaitable[T]],
        have: Callable[[], int] = lambda: 0,
        unconnected: int | None = None,
    ) -> T:
        """Repeat `work` until it succeeds. `have` returns the bytes received so far; raise HubError
        after len(pauses_s) + 1 failures in a row without a new byte. If the last one was that the
        hub cannot be connected to, `unconnected` retries are enough."""
        failures = 0
        while True:
            before = have()
            try:
                return await work()
            except (aiohttp.ClientError, TimeoutError, _Broken) as error:
                why = " ".join(str(error).split()) or type(error).__name__
                failures = 1 if have() > before else failures + 1
                most = len(self.pauses_s)
                if unconnected is not None and isinstance(error, aiohttp.ClientConnectorError):
                    most = min(most, unconnected)
                if failures > most:
                    raise HubError(f"{self.endpoint} cannot provide {self.model}: {why}") from error
                asked_s = error.wait_s if isinstance(error, _Broken) else 0.0
                pause_s = max(self.pauses_s[failures - 1], min(asked_s, LONGEST_PAUSE_S))
                logger.warning("%s: %s; trying again in %g s", self.model, why, pause_s)
                await asyncio.sleep(pause_s)

    def _check(self, answer: aiohttp.ClientResponse) -> None:
        """Raise HubError for a final refusal, _Broken for a retryable status."""
        status, model = answer.status, self.model
        if status < 400:
            return
        if status == 401:
            raise HubError(
                f"{self.endpoint} refuses {model} (401): the model does not exist, or it needs "
                "a token: set HF_TOKEN (in an InferencePool, model.secretRef)"
            )
        if status == 403:
            raise HubError(
                f"{self.endpoint} refuses {model} (403): accept the model's terms there, and set"
                " HF_TOKEN (in an InferencePool, model.secretRef) to a token that may read it"
            )
        if status == 404:
            raise HubError(
                f"{self.endpoint} has no {model} (404): check the name"
                + (f" and the revision {model.revision!r}" if model.revision else "")
            )
        retry_after = answer.headers.get("Retry-After", "")
        if status == 429 or status >= 500:
            raise _Broken(f"HTTP {status}", float(retry_after) if retry_after.isdigit() else 0.0)
        raise HubError(f"{self.endpoint} refuses {model}: HTTP {status} {answer.reason}")


def open_session(token: str) -> aiohttp.ClientSession:
    """Open a session to a hub. Redirects to other hosts do not get the token. Proxies come from the
    environment (HTTPS_PROXY, NO_PROXY)."""
    # No compression: sizes and ranges refer to the bytes as stored.
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return aiohttp.ClientSession(
        headers=headers,
        trust_env=True,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
        read_bufsize=CHUNK_BYTES,
    )


def _is_shown(name: str) -> bool:
    """Whether a file is in the repository's top folder and not hidden: a node reads no others."""
    return "/" not in name and not name.startswith(".")

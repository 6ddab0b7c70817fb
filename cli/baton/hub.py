"""A Hugging Face hub over plain HTTP: what a repository holds, and its files from any byte on.

In: a HubModel, the hub's address and perhaps a token. Out: `Wanted`, and bytes in a folder. What
breaks is tried again, with pauses, as long as bytes come in between; what cannot be is a HubError
of one line. Not by huggingface_hub: a node's image has none, and what it has fetched of a file is
nobody else's to see or to resume.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from baton.errors import CommandError
from baton.fetched import PART, Fetched, Wanted
from baton.model_folder import HUB_FILES
from baton_protocol.model_source import HubModel

DEFAULT_ENDPOINT = "https://huggingface.co"
MAIN = "main"
PARALLEL_FILES = 4
CHUNK_BYTES = 1 << 20
CONNECT_S = 10.0
SILENCE_S = 30.0
# Before each next try; a server's Retry-After counts up to the longest.
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
LONGEST_PAUSE_S = 60.0

logger = logging.getLogger(__name__)
T = TypeVar("T")


class HubError(CommandError):
    """The hub does not give it; the message is one line and says what to do."""


class _Broken(Exception):
    """This try failed, another may not. `wait_s`: the server's word on when."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _Sibling(msgspec.Struct, frozen=True):
    rfilename: str
    size: int | None = None


class _Listing(msgspec.Struct, frozen=True):
    siblings: tuple[_Sibling, ...] = ()
    sha: str = ""


@dataclass(frozen=True)
class Hub:
    """One repository of one hub. `session` carries the token and is the caller's to close."""

    session: aiohttp.ClientSession
    endpoint: str
    model: HubModel
    pauses_s: Sequence[float] = PAUSES_S

    async def list(self) -> Wanted:
        """What of the repository a node reads, in one commit. Raise HubError."""
        listing = await self._retried(self._list)
        commit = listing.sha or self.model.revision or MAIN
        sizes = {item.rfilename: item.size for item in listing.siblings if _is_read(item.rfilename)}
        if "tokenizer.json" not in sizes:
            raise HubError(f"{self.model} holds no tokenizer.json: Baton cannot serve it")
        for name, size in sizes.items():
            if size is None:
                sizes[name] = await self._retried(partial(self._ask_size, commit, name))
        return Wanted(commit=commit, files={name: size or 0 for name, size in sizes.items()})

    async def download(self, folder: Fetched, wanted: Wanted) -> None:
        """Every file that is not there yet, a few at once. Raise HubError, OSError."""
        few = asyncio.Semaphore(PARALLEL_FILES)

        async def one(name: str, size: int) -> None:
            async with few:
                if not (folder.path / name).exists():
                    get = partial(self._get, folder, wanted.commit, name, size)
                    await self._retried(get, partial(folder.part, name))
                    await asyncio.to_thread(folder.settle, name)

        try:
            async with asyncio.TaskGroup() as group:
                for name, size in wanted.files.items():
                    group.create_task(one(name, size), name=f"fetch {name}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

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
            raise HubError(f"{self.endpoint} is no hub: it answered {body[:60]!r}") from error

    async def _ask_size(self, commit: str, name: str) -> int:
        """From a hub whose list does not say it."""
        async with self._open(commit, name, {"Range": "bytes=0-0"}) as answer:
            if answer.status == 416:  # an empty file
                return 0
            self._check(answer)
            told = answer.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(told) if told.isdigit() else answer.content_length
        if size is None:
            raise HubError(f"{self.endpoint} does not say how large {name} of {self.model} is")
        return size

    async def _get(self, folder: Fetched, commit: str, name: str, size: int) -> None:
        have = folder.part(name)
        if have >= size:
            return
        headers = {"Range": f"bytes={have}-"} if have else {}
        async with self._open(commit, name, headers) as answer:
            if answer.status == 416:
                folder.drop(name)
                raise _Broken(f"the hub has no byte {have} of {name}")
            self._check(answer)
            # A server that ignores Range sends all of it.
            have = have if answer.status == 206 else 0
            with (folder.path / (name + PART)).open("ab") as file:
                file.truncate(have)
                async for data in answer.content.iter_chunked(CHUNK_BYTES):
                    have += file.write(data)
        if have > size:
            folder.drop(name)
        if have != size:
            raise _Broken(f"{name} came with {have} bytes instead of {size}")

    def _open(
        self, commit: str, name: str, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        place = f"{self.model.repository}/resolve/{quote(commit, safe='')}/{quote(name, safe='')}"
        return self.session.get(URL(f"{self.endpoint}/{place}", encoded=True), headers=headers)

    # --- tries ------------------------------------------------------------------------------------

    async def _retried(
        self, work: Callable[[], Awaitable[T]], have: Callable[[], int] = lambda: 0
    ) -> T:
        """`work` until it succeeds. Give up after a row of tries in which no byte came."""
        failures = 0
        while True:
            before = have()
            try:
                return await work()
            except (aiohttp.ClientError, TimeoutError, _Broken) as error:
                why = " ".join(str(error).split()) or type(error).__name__
                failures = 1 if have() > before else failures + 1
                if failures > len(self.pauses_s):
                    raise HubError(f"{self.endpoint} does not give {self.model}: {why}") from error
                asked_s = error.wait_s if isinstance(error, _Broken) else 0.0
                pause_s = max(self.pauses_s[failures - 1], min(asked_s, LONGEST_PAUSE_S))
                logger.warning("%s: %s; trying again in %g s", self.model, why, pause_s)
                await asyncio.sleep(pause_s)

    def _check(self, answer: aiohttp.ClientResponse) -> None:
        """Raise HubError for a refusal, _Broken for what may pass."""
        status, model = answer.status, self.model
        if status < 400:
            return
        if status == 401:
            raise HubError(
                f"{self.endpoint} refuses {model} (401): there is no such model, or it needs a"
                " token: set HF_TOKEN (in an InferencePool, model.secretRef)"
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
        told = answer.headers.get("Retry-After", "")
        if status == 429 or status >= 500:
            raise _Broken(f"HTTP {status}", float(told) if told.isdigit() else 0.0)
        raise HubError(f"{self.endpoint} refuses {model}: HTTP {status} {answer.reason}")


def open_session(token: str) -> aiohttp.ClientSession:
    """To a hub and to where it redirects; the token stays with the hub. Proxies are the
    environment's (HTTPS_PROXY, NO_PROXY)."""
    # Sizes and ranges are of the bytes as stored.
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return aiohttp.ClientSession(
        headers=headers,
        trust_env=True,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
        read_bufsize=CHUNK_BYTES,
    )


def _is_read(name: str) -> bool:
    """Whether a node reads it: a file of the repository's top folder, and not a hidden one."""
    shown = "/" not in name and not name.startswith(".")
    return shown and any(fnmatchcase(name, pattern) for pattern in HUB_FILES)

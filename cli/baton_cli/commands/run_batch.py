"""`baton run-batch`: answers a file of requests, with a running server or a pool of its own.

In: RunBatchOptions. Out: a file with a line per request; the exit code is 1 if one has no answer.
All lines of the input are checked before a pool starts or a request is sent.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import aiohttp

from baton_cli.batch.requests_file import check_requests, read_requests
from baton_cli.batch.sender import TIMEOUT, BatchSender, Counts
from baton_cli.commands.run_batch_options import RunBatchOptions
from baton_cli.commands.up import run_on_port, run_pool, settle
from baton_cli.errors import CommandError, UsageError
from baton_cli.local_pool.display import Display
from baton_cli.local_pool.router_client import RouterAddress
from baton_cli.local_pool.stop_requests import StopRequests
from baton_cli.local_pool.supervisor import Supervisor


def run(options: RunBatchOptions) -> int:
    source, target = _files(options)
    total = check_requests(source)
    base = base_of(options.url) if options.url else ""
    if not options.url:
        options = settle(options)
    counts = Counts()
    try:
        with _opened(target) as output:
            if options.url:
                asyncio.run(_send(options, base, "", output, counts))
            else:
                run_on_port(options, partial(_with_pool, output=output, counts=counts))
    finally:
        unsent = total - counts.completed - counts.failed
        print(
            f"{total} requests: {counts.completed} answered, {counts.failed} failed"
            + (f", {unsent} not answered" if unsent else "")
            + f"; {target}",
            file=sys.stderr,
        )
    return 0 if counts.completed == total else 1


def _files(options: RunBatchOptions) -> tuple[Path, Path]:
    if not options.input_file or not options.output_file:
        raise UsageError("give the files: -i FILE with requests, -o FILE for the answers")
    source, target = Path(options.input_file), Path(options.output_file)
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"-o {target} is the file with the requests; give another one")
    return source, target


def _opened(target: Path) -> BinaryIO:
    try:
        return open(target, "wb")
    except OSError as error:
        raise CommandError(f"cannot write {target}: {error.strerror}") from error


def base_of(url: str) -> str:
    """The server's URL without a slash at its end. Raise UsageError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url} is not a URL; write http://HOST:PORT")
    base = url.rstrip("/")
    if parts.path.rstrip("/").endswith("/v1"):
        raise UsageError(
            f"--url {url} ends with /v1, which the lines' urls have, too: leave it out"
        )
    return base


async def _with_pool(options: RunBatchOptions, output: BinaryIO, counts: Counts) -> None:
    """Start a pool, send the requests to its router, and end the pool."""
    address = RouterAddress(options.host, options.port, uds=options.uds)

    async def work(supervisor: Supervisor, stop: StopRequests) -> None:
        await supervisor.ready.wait()
        try:
            await _send(options, address.url, options.uds, output, counts)
        finally:
            stop.requested.set()

    if not await run_pool(options, Display(sys.stderr, sys.stderr), work):
        raise CommandError("the pool was stopped before all requests had an answer")


async def _send(
    options: RunBatchOptions, base: str, uds: str, output: BinaryIO, counts: Counts
) -> None:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limit = options.max_concurrency
    connector = (
        aiohttp.UnixConnector(uds, limit=limit) if uds else aiohttp.TCPConnector(limit=limit)
    )
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, headers=headers) as http:
        sender = BatchSender(http, base, output, counts)
        await sender.send_all(read_requests(Path(options.input_file)), limit)

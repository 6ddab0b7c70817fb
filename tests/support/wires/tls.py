"""A proxy that terminates TLS in front of a Redis server without TLS.

In: a unix socket's URL and a certificate made for the test. Out: the proxy's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton_kvstore.connection.endpoint import parse_endpoint
from tests.support.needs import needs
from tests.support.wires.wire import CALL_S, WireLoop

READ_BYTES = 1 << 16


def make_certificate(folder: Path) -> Path:
    """Make a key and a certificate for localhost, in one file."""
    needs("openssl")
    file = folder / "server.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {file} -out {file}",
        shell=True,
        check=True,
        capture_output=True,
        timeout=CALL_S,
    )
    return file


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.CancelledError):
        while data := await source.read(READ_BYTES):
            sink.write(data)
            await sink.drain()
    sink.close()


@contextmanager
def tls_before(loop: WireLoop, url: str, certificate: Path) -> Iterator[str]:
    """Yield the address (`localhost:PORT`) of a proxy to the server at `url`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    path = parse_endpoint(url).path

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        ends = (writer, inner_writer)
        try:
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
            await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)
        finally:
            for end in ends:
                end.transport.abort()
            serving.discard(asyncio.current_task())

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)

    async def end(server: asyncio.Server) -> None:
        """Close all connections: Python warns of open ones."""
        server.close()
        left = [task for task in serving if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next turn

    server = asyncio.run_coroutine_threadsafe(start(), loop.loop).result(CALL_S)
    try:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop.loop).result(CALL_S)

"""A router at a URL, as a command on a terminal asks it.

In: the URL, an API key, paths. Out: JSON, or the events of a stream. Uses the standard library's
blocking HTTP client, which imports fast. Every error is a CommandError: the router's own message,
or why there is none.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from baton_cli.bench.stream import SseReader
from baton_cli.errors import CommandError
from baton_cli.terminal.text import visible_line

Json = dict[str, Any]

ANSWER_S = 10.0
# Longer than a router leaves a stream without a byte (`--keepalive`), also a patient one.
SILENCE_S = 600.0
PIECE = 1 << 16


@dataclass(frozen=True)
class RemoteRouter:
    url: str
    key: str = field(default="", repr=False)

    def ask(self, path: str, body: Json | None = None) -> Json:
        """The answer to GET, or with a body to POST."""
        try:
            return dict(json.loads(self.read(path, body)))
        except (ValueError, TypeError) as error:
            raise self._foreign(error) from error

    def read(self, path: str, body: Json | None = None) -> bytes:
        """As `ask`, for an answer of any type."""
        stream = self._open(path, body, ANSWER_S)
        try:
            return stream.response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error
        finally:
            stream.close()

    def stream(self, path: str, body: Json | None = None) -> EventStream:
        """The events of an answer. The caller closes the stream."""
        return self._open(path, body, SILENCE_S)

    def _open(self, path: str, body: Json | None, timeout_s: float) -> EventStream:
        base, headers = self._base(), self._headers()
        link = _connection(base, timeout_s)
        try:
            link.connect()
            held = link.sock
            link.request(
                "GET" if body is None else "POST",
                base.path.rstrip("/") + path,
                None if body is None else json.dumps(body).encode(),
                headers,
            )
            response = link.getresponse()
            if response.status != 200:
                raise self._refusal(response)
        except (OSError, http.client.HTTPException) as error:
            link.close()
            raise self._silent(error) from error
        except BaseException:
            link.close()
            raise
        return EventStream(self.url, link, held, response)

    def _base(self) -> SplitResult:
        base = urlsplit(self.url)
        if base.scheme not in ("http", "https") or not base.hostname:
            raise CommandError(f"--url {self.url} is not a URL; write http://HOST:PORT")
        return base

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.key:
            if not (self.key.isascii() and self.key.isprintable()):
                raise CommandError(
                    "the API key has characters that no HTTP header can carry; use printable ASCII"
                    " characters"
                )
            headers["Authorization"] = f"Bearer {self.key}"
        return headers

    def _refusal(self, response: http.client.HTTPResponse) -> CommandError:
        try:
            message = json.loads(response.read())["error"]["message"]
            text = visible_line(str(message))
            return Refused(f"{text} (HTTP {response.status})", response.status)
        except (ValueError, KeyError, TypeError) as error:
            return self._foreign(error)

    def _silent(self, error: Exception) -> CommandError:
        return CommandError(
            f"no router answers at {self.url}: {error or repr(error)}; start one with `baton up`,"
            " or name its address with --url"
        )

    def _foreign(self, error: Exception) -> CommandError:
        return CommandError(f"{self.url} is not a Baton router: {error!r}")


class Refused(CommandError):
    """The router's own error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EventStream:
    """The events of one answer, as the text of their data."""

    def __init__(
        self,
        url: str,
        link: http.client.HTTPConnection,
        held: socket.socket,
        response: http.client.HTTPResponse,
    ) -> None:
        self.response = response
        self._url, self._link, self._socket = url, link, held

    def header(self, name: str) -> str:
        return self.response.getheader(name) or ""

    def __iter__(self) -> Iterator[bytes]:
        """Raise CommandError if the connection breaks."""
        events = SseReader()
        try:
            while piece := self.response.read1(PIECE):
                yield from events.feed(piece)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CommandError(
                f"the connection to {self._url} broke: {error or repr(error)}"
            ) from error

    def interrupt(self) -> None:
        """End the stream while another thread reads it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended

    def close(self) -> None:
        """Close the connection, which ends a request that still runs."""
        self.response.close()
        self._link.close()


def _connection(base: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    secure = base.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    assert base.hostname is not None
    try:
        return kind(base.hostname, base.port, timeout=timeout_s)
    except ValueError as error:
        raise CommandError(f"--url {base.geturl()}: {error}") from error

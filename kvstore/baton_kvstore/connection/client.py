"""redis-py's asyncio client, tamed: bounded connections, short deadlines, our errors.

In: an `Endpoint` and awaitables of the client. Out: replies, or StoreUnavailable. For small
commands only; values go through `data`. One event loop per instance.

A caller may give up (be cancelled) at any moment: the client closes the connection that still owes
an answer. No WATCH here: its client waits for the server once more when it is cancelled.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import (
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.errors import LinkBroken, LinkTimeout, ServerRefused

T = TypeVar("T")
CONNECT_TIMEOUT_S = 1.0
OPERATION_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 8


class ClosesItself(ABC):
    """`async with` for what has a close()."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _connection_options(endpoint: Endpoint) -> dict[str, Any]:
    options: dict[str, Any] = {
        "db": endpoint.db,
        "username": endpoint.username or None,
        "password": endpoint.password or None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": None,  # `call` bounds each wait
        "protocol": 2,
        # A connection may have died while idle: once more on a new one, at once.
        "retry": Retry(NoBackoff(), 1),
        "retry_on_error": [RedisConnectionError],
    }
    if endpoint.kind == "unix":
        return options | {"path": endpoint.path, "connection_class": UnixDomainSocketConnection}
    options |= {"host": endpoint.host, "port": endpoint.port, "connection_class": Connection}
    if endpoint.kind == "tls":
        given = dict(endpoint.options)
        check = given.pop("ssl_check_hostname", "true").lower() not in ("false", "0", "no")
        options |= {**given, "ssl_check_hostname": check, "connection_class": SSLConnection}
    return options


class AsyncClient:
    """A Redis client whose calls go through `call`, which bounds and translates."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float = OPERATION_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.label = endpoint.label
        self.timeout_s = timeout_s
        self._pool: BlockingConnectionPool = BlockingConnectionPool(
            max_connections=max_connections,
            timeout=None,
            **_connection_options(endpoint),
        )
        # Any: redis-py's own types change from release to release; callers name what they expect.
        self.redis: Any = Redis(connection_pool=self._pool)

    async def call(self, what: Awaitable[T], extra_s: float = 0.0) -> T:
        """Await one command. `extra_s` is the time it may block on the server by intent. Raise
        ServerRefused for an error reply, LinkTimeout or LinkBroken where none came."""
        try:
            async with asyncio.timeout(self.timeout_s + extra_s):
                return await what
        except TimeoutError as error:
            raise LinkTimeout(f"{self.label} did not answer in time") from error
        except ResponseError as error:
            code = "OOM" if isinstance(error, OutOfMemoryError) else "ERR"
            raise ServerRefused(f"{code} {error} [{self.label}]") from error
        except (RedisError, OSError) as error:
            raise LinkBroken(f"Redis at {self.label}: {error}") from error

    async def close(self) -> None:
        """Close all connections; errors of a dead server do not matter any more."""
        await self.redis.aclose()
        await self._pool.disconnect(inuse_connections=True)

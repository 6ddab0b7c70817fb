"""A wrapper of redis-py's asyncio client: bounded connections, short timeouts, Baton's errors.

It is for small commands only; chunks go through `data`. An instance belongs to one event loop.

A caller may be cancelled at any moment: the client then closes the connection with the pending
reply. Do not use WATCH: when cancelled, redis-py waits for the server once more to undo it.
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
    """Adds `async with` to a class with an async close()."""

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
        # A connection may have died while idle: retry once, at once, on a new one.
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
    """A Redis client. Pass each command of `redis` to `call`, which applies the timeout and
    translates errors."""

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
        # Any: redis-py's types change between releases; callers annotate the replies they expect.
        self.redis: Any = Redis(connection_pool=self._pool)

    async def call(self, command: Awaitable[T], extra_s: float = 0.0) -> T:
        """Await one command and return its reply.

        `extra_s` is added to the timeout, for commands that block on the server. Raise
        ServerRefused for an error reply, LinkTimeout or LinkBroken if no reply came.
        """
        try:
            async with asyncio.timeout(self.timeout_s + extra_s):
                return await command
        except TimeoutError as error:
            raise LinkTimeout(f"{self.label} did not answer in time") from error
        except ResponseError as error:
            code = "OOM" if isinstance(error, OutOfMemoryError) else "ERR"
            raise ServerRefused(f"{code} {error} [{self.label}]") from error
        except (RedisError, OSError) as error:
            raise LinkBroken(f"cannot reach Redis at {self.label}: {error}") from error

    async def close(self) -> None:
        """Close all connections, including those in use."""
        await self.redis.aclose()
        await self._pool.disconnect(inuse_connections=True)

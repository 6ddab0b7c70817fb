"""Reads a pool's Redis index for what only its nodes and routers know: the nodes, the progress of
fetches, and the demand of clients.

In: a pool, and its nodes' login. Out: an `IndexAnswer`, or None if the index was not read or did
not answer. Status works without it: outside the cluster, or behind a NetworkPolicy that forbids it,
there is no answer. So the index is read only when needed, with a short timeout, on a connection of
its own, and with a backoff while it is silent.

The pool names the address of an external index, so the server may be anything. `egress` restricts
the addresses, and the registry bounds answers and drops invalid reports. What is wrong with an
external store is reported in words of our own (`store_check`). The data servers of an external
store are only asked for a sign of life, while the pool is not ready and no node of it uses them.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from baton_kvstore.connection.endpoint import parse_endpoint, with_login
from baton_kvstore.errors import StoreError
from baton_kvstore.index.registry import Registry
from baton_operator.api.pool import Pool
from baton_operator.api.status import READY, PoolStatus
from baton_operator.builders.store_access import store_settings
from baton_operator.kube.egress import AddressRefused, Network, allowed
from baton_operator.state.decision_log import DecisionLog
from baton_operator.state.index_timing import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    LastQuery,
    next_read_at,
    pause_s,
    planned_pause_s,
)
from baton_operator.state.lookups import Lookups
from baton_operator.state.observed import Observed
from baton_operator.state.store_check import StoreProblem, ping, problem_with
from baton_protocol.store import FetchReport, NodeReport, RouterReport

logger = logging.getLogger(__name__)
ANSWER_S = 2.0
WRITE_S = 0.5
SILENT = 3  # failed reads in a row after which an index counts as silent


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """The login for an external store: values of its `secretRef`, and of `caSecretRef` (PEM)."""

    username: str = ""
    password: str = ""
    certificate: str = ""

    def __repr__(self) -> str:
        return "Login(...)"


class IndexAnswer(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeReport, ...]
    fetches: tuple[FetchReport, ...]
    routers: tuple[RouterReport, ...] = ()


class IndexReader:
    """Reads one pool's index; keeps only the time of the last read. For one event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        answer_s: float = ANSWER_S,
        networks: Sequence[Network] = (),
        lookups: Lookups | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        """`clock` is monotonic, in seconds. `networks`: allowed networks of external indexes.
        `lookups` is shared by all pools; by default the reader has its own. `decisions` are
        written to the index that has just answered."""
        self._clock = clock
        self._answer_s = answer_s
        self._networks = networks
        self._lookups = lookups or Lookups()
        self._decisions = decisions or DecisionLog()
        self._last_query: LastQuery | None = None

    def due_in(self, pool: Pool, observed: Observed, status: PoolStatus | None) -> float | None:
        """Seconds until `read` would read; None until something else changes."""
        pause = pause_s(pool, observed, status)
        if pause is None:
            return None
        longest_s = FIRST_RETRY_S if planned_pause_s(pool) else LONGEST_RETRY_S
        last = self._last_query
        if last is not None and last.urls != _urls(pool):
            last = None  # the store of the last answer is no longer the pool's
        next_s = next_read_at(pause, last, longest_s)
        return max(0.0, next_s - self._clock())

    async def read(
        self, pool: Pool, observed: Observed, status: PoolStatus | None, login: Login | None = None
    ) -> IndexAnswer | None:
        """Read the index if that is due. `login` is only for an external store."""
        if self.due_in(pool, observed, status) != 0.0:
            return None
        before = self._last_query or LastQuery(0.0)
        # Recorded before the first await, so that a second call does not read as well.
        if before.urls != (urls := _urls(pool)):
            before = LastQuery(0.0)
        self._last_query = msgspec.structs.replace(before, at=self._clock(), urls=urls)
        answer, problem, refused = None, None, ""
        async with self._lookups.turn(pool.namespace):
            try:
                answer = await self._ask(pool, login)
            except AddressRefused as error:
                problem, refused = problem_with("index", urls[0], error), str(error)
                if refused != before.refused:
                    logger.warning("not querying the index of pool %s: %s", pool.key, refused)
            except (StoreError, OSError, TimeoutError) as error:
                logger.debug("index of pool %s: %s", pool.key, error)
                problem = problem_with("index", urls[0], error)
            if pool.spec.kv_store.external is None:
                problem = None  # its pods say what is wrong
            elif answer is not None and not _is_used(status, answer):
                problem = await self._check_data(pool, login)
        failures = 0 if answer else before.failures + 1
        self._last_query = LastQuery(self._clock(), failures, refused, urls, problem)
        return answer

    @property
    def silent(self) -> bool:
        """Whether the last several reads in a row failed."""
        return self._last_query is not None and self._last_query.failures >= SILENT

    @property
    def problem(self) -> StoreProblem | None:
        """What the last read found wrong with an external store."""
        return self._last_query.problem if self._last_query is not None else None

    async def _ask(self, pool: Pool, login: Login | None) -> IndexAnswer:
        """Raise AddressRefused, StoreError, OSError or TimeoutError."""
        with index_url_of(pool, login) as url:
            async with asyncio.timeout(self._answer_s):
                addresses = await self._addresses(pool, store_settings(pool).index_url)
                async with Registry(url, pool.key, addresses) as registry:
                    nodes, fetches = await registry.nodes(), await registry.fetches()
                    routers = await registry.routers() if planned_pause_s(pool) else []
            await self._write_decisions(url, pool.key, addresses)
        return IndexAnswer(nodes=tuple(nodes), fetches=tuple(fetches), routers=tuple(routers))

    async def _write_decisions(self, url: str, pool: str, addresses: Sequence[str]) -> None:
        """They are for people: a failure costs nothing, and the next read tries again."""
        try:
            async with asyncio.timeout(WRITE_S):
                await self._decisions.write(url, pool, addresses)
        except (StoreError, OSError, TimeoutError) as error:
            logger.debug("cannot write decisions to the index of pool %s: %s", pool, error)

    async def _check_data(self, pool: Pool, login: Login | None) -> StoreProblem | None:
        """The problem of the first data server that has one. They share one timeout, so that a
        long list of silent ones does not delay other pools of the namespace."""
        end = asyncio.get_running_loop().time() + self._answer_s
        for url in store_settings(pool).data_urls:
            try:
                async with asyncio.timeout_at(end):
                    addresses = await self._addresses(pool, url)
                    with url_with_login(pool, url, login) as with_password:
                        await ping(with_password, addresses)
            except (AddressRefused, StoreError, OSError, TimeoutError) as error:
                logger.debug("data server of pool %s: %s", pool.key, error)
                return problem_with("data", url, error)
        return None

    async def _addresses(self, pool: Pool, url: str) -> list[str]:
        """Checked for a managed index too: users who may edit its Service can redirect its name."""
        endpoint = parse_endpoint(url)
        addresses = await self._lookups.addresses(pool.namespace, endpoint.host, endpoint.port)
        networks = self._networks if pool.spec.kv_store.external is not None else ()
        return allowed(endpoint.host, addresses, networks)


@contextmanager
def index_url_of(pool: Pool, login: Login | None) -> Iterator[str]:
    """The index's URL with the login. The CA file, which only the nodes' pods have at its usual
    path, is a temporary file while the context lasts."""
    with url_with_login(pool, store_settings(pool).index_url, login) as url:
        yield url


@contextmanager
def url_with_login(pool: Pool, url: str, login: Login | None) -> Iterator[str]:
    """The same for any URL of the pool's store."""
    if pool.spec.kv_store.external is None:
        yield with_login(url, "", pool.credentials.redis_password)
        return
    login = login or Login()
    with tempfile.NamedTemporaryFile("w", suffix=".crt") as file:
        file.write(login.certificate)
        file.flush()
        yield with_login(_with_certificate(url, file.name), login.username, login.password)


def _urls(pool: Pool) -> tuple[str, ...]:
    """The index's URL, then those of the data servers."""
    settings = store_settings(pool)
    return settings.index_url, *settings.data_urls


def _is_used(status: PoolStatus | None, answer: IndexAnswer) -> bool:
    """Whether the pool's own nodes use the data servers: they know better than the operator."""
    ready = status.condition(READY) if status is not None else None
    settled = ready is not None and ready.status == "True"
    return settled or any(node.serves and node.store != "down" for node in answer.nodes)


def _with_certificate(url: str, path: str) -> str:
    """Replace the path of the CA file in the nodes' pods."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if "ssl_ca_certs" not in options:
        return url
    return parts._replace(query=urlencode(options | {"ssl_ca_certs": path})).geturl()

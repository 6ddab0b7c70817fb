"""What only a pool's nodes and routers know, asked of its Redis index: who they are, how far a
fetch is, what clients ask for.

In: a pool, and the login that its nodes have. Out: an `Answer`, or None where the index was not
asked or did not answer. Status gets by without: from outside the cluster, or behind a NetworkPolicy
that forbids it, nobody answers. So it is asked only when that is worth it, for a short time, over a
connection of its own, and ever more seldom while it is silent.

The pool says where an external index is, so the server may be anything: `egress` says where the
operator connects to, and the registry reads bounded answers and leaves out what is no report. Why a
server did not answer is in the log alone: a pool's status is no port scanner.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import parse_qsl, urlencode, urlsplit
from weakref import WeakValueDictionary

import msgspec

from baton_kvstore.connection.endpoint import parse_endpoint, with_login
from baton_kvstore.errors import StoreError
from baton_kvstore.index.registry import Registry
from baton_operator.api.pool import Pool
from baton_operator.api.status import READY, PoolStatus
from baton_operator.builders.store import store_settings
from baton_operator.kube.egress import Address, AddressRefused, Network, allowed, look_up
from baton_operator.state.observed import Observed
from baton_protocol.store import ROLES, FetchReport, NodeReport, RouterReport

logger = logging.getLogger(__name__)
ANSWER_S = 2.0
# How long an answer is good for: while nodes drain, of a pool that sleeps (a request may wait), of
# one whose nodes are planned for, of a fetch, of a pool that is not as it should be, of others.
DRAINING_S = 2.0
ASLEEP_S = 2.0
LOOK_S = 5.0
FETCHING_S = 5.0
UNSETTLED_S = 15.0
STEADY_S = 60.0
FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 300.0
SILENT = 3  # questions in a row without an answer
LOOKUPS = 4  # names that are looked up at a time


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """Of an external store: values of its `secretRef`, and of `caSecretRef` (PEM)."""

    username: str = ""
    password: str = ""
    certificate: str = ""

    def __repr__(self) -> str:
        return "Login(...)"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeReport, ...]
    fetches: tuple[FetchReport, ...]
    routers: tuple[RouterReport, ...] = ()


class LastQuery(msgspec.Struct, frozen=True):
    """When a pool's index was asked last, and how often in a row it did not answer. `refused`: why
    the operator does not connect to it."""

    at: float
    failures: int = 0
    refused: str = ""


def pause_s(pool: Pool, observed: Observed, status: PoolStatus | None) -> float | None:
    """How long one answer is good for; None while there is nobody to ask."""
    managed = pool.spec.kv_store.external is None
    index = [pod for pod in observed.pods if pod.component == "kv-index" and pod.ready]
    nodes = [pod for pod in observed.pods if pod.component in ROLES]
    planned = _planned_s(pool)
    if (managed and not index) or not (nodes or planned):
        return None
    if observed.drains:
        return (planned or UNSETTLED_S) if observed.held else DRAINING_S
    if planned:
        return planned
    if any(pod.fetch == "running" for pod in nodes):
        return FETCHING_S
    ready = status.condition(READY) if status is not None else None
    settled = ready is not None and ready.status == "True"
    return STEADY_S if status is not None and settled and status.fingerprint else UNSETTLED_S


def _planned_s(pool: Pool) -> float:
    """0 where nobody plans."""
    if pool.spec.autoscaling is None or not pool.spec.autoscaling.is_planned:
        return 0.0
    return LOOK_S if pool.spec.prefill.replicas + pool.spec.decode.replicas else ASLEEP_S


def next_question(
    pause: float, last: LastQuery | None, longest_s: float = LONGEST_RETRY_S
) -> float:
    """The moment at which to ask (again), `longest_s` after a failure at the latest."""
    if last is None:
        return 0.0
    if not last.failures:
        return last.at + pause
    # 2 ** 10 is beyond the longest.
    retry = FIRST_RETRY_S * 2.0 ** min(last.failures - 1, 10)
    return last.at + min(longest_s, retry)


class Lookups:
    """Looks up names of hosts, for all pools of one event loop. `resolve` gives the addresses of a
    host and may wait; it runs in a thread."""

    def __init__(self, resolve: Callable[[str, int], tuple[Address, ...]] = look_up) -> None:
        self._resolve = resolve
        # Not the event loop's own threads: a slow DNS server would keep others from their lookups.
        self._threads = ThreadPoolExecutor(LOOKUPS, "index-lookup")
        self._running: dict[str, Future[tuple[Address, ...]]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(LOOKUPS)

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """One index of a namespace is asked at a time, and no more at all than there are threads:
        one whose indexes never answer keeps no other namespace waiting."""
        turn = self._turns.setdefault(namespace, asyncio.Lock())
        async with turn, self._slots:
            yield

    async def addresses(self, namespace: str, host: str, port: int) -> tuple[Address, ...]:
        """One lookup of a namespace at a time: one cannot be ended, and its name's server may never
        answer."""
        running = self._running.get(namespace)
        if running is not None and not running.done():
            raise TimeoutError("an earlier lookup of this namespace has not ended")
        running = self._threads.submit(self._resolve, host, port)
        self._running[namespace] = running
        found = await asyncio.wrap_future(running)
        if self._running.get(namespace) is running:
            del self._running[namespace]
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class IndexReader:
    """Asks one pool's index, and remembers only when. For one event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        answer_s: float = ANSWER_S,
        networks: Sequence[Network] = (),
        lookups: Lookups | None = None,
    ) -> None:
        """`clock` tells seconds and never goes back. `networks`: where external indexes may be.
        `lookups` are those of all pools; without any it has its own."""
        self._clock = clock
        self._answer_s = answer_s
        self._networks = networks
        self._lookups = lookups or Lookups()
        self._last_query: LastQuery | None = None

    def due_in(self, pool: Pool, observed: Observed, status: PoolStatus | None) -> float | None:
        """In how many seconds `read` would ask; None: not before something else changes."""
        pause = pause_s(pool, observed, status)
        if pause is None:
            return None
        longest_s = FIRST_RETRY_S if _planned_s(pool) else LONGEST_RETRY_S
        next_s = next_question(pause, self._last_query, longest_s)
        return max(0.0, next_s - self._clock())

    async def read(
        self, pool: Pool, observed: Observed, status: PoolStatus | None, login: Login | None = None
    ) -> Answer | None:
        """Ask if it is time to. `login` is for an external store alone."""
        if self.due_in(pool, observed, status) != 0.0:
            return None
        before = self._last_query or LastQuery(0.0)
        # Said at once: two at a time would be one too many.
        self._last_query = msgspec.structs.replace(before, at=self._clock())
        answer, refused = None, ""
        try:
            async with self._lookups.turn(pool.namespace):
                answer = await self._ask(pool, login)
        except AddressRefused as error:
            refused = str(error)
            if refused != before.refused:
                logger.warning("index of pool %s is not asked: %s", pool.key, refused)
        failures = 0 if answer else before.failures + 1
        self._last_query = LastQuery(self._clock(), failures, refused)
        return answer

    @property
    def silent(self) -> bool:
        """The index has not answered several times in a row."""
        return self._last_query is not None and self._last_query.failures >= SILENT

    async def _ask(self, pool: Pool, login: Login | None) -> Answer | None:
        try:
            async with asyncio.timeout(self._answer_s):
                addresses = await self._addresses(pool)
                with index_url_of(pool, login) as url:
                    async with Registry(url, pool.key, addresses) as registry:
                        nodes, fetches = await registry.nodes(), await registry.fetches()
                        routers = await registry.routers() if _planned_s(pool) else []
        except (StoreError, OSError, TimeoutError) as error:
            logger.debug("index of pool %s: %s", pool.key, error)
            return None
        return Answer(nodes=tuple(nodes), fetches=tuple(fetches), routers=tuple(routers))

    async def _addresses(self, pool: Pool) -> list[str]:
        """Of a managed index, too: who may edit its Service can make it another name's."""
        endpoint = parse_endpoint(store_settings(pool).index_url)
        found = await self._lookups.addresses(pool.namespace, endpoint.host, endpoint.port)
        networks = self._networks if pool.spec.kv_store.external is not None else ()
        return allowed(endpoint.host, found, networks)


@contextmanager
def index_url_of(pool: Pool, login: Login | None) -> Iterator[str]:
    """With login. A certificate is a file for as long: that of the nodes' pods is not here."""
    url = store_settings(pool).index_url
    if pool.spec.kv_store.external is None:
        yield with_login(url, "", pool.credentials.redis_password)
        return
    login = login or Login()
    with tempfile.NamedTemporaryFile("w", suffix=".crt") as file:
        file.write(login.certificate)
        file.flush()
        yield with_login(_with_certificate(url, file.name), login.username, login.password)


def _with_certificate(url: str, path: str) -> str:
    """In the place of the one that the nodes' pods have."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if "ssl_ca_certs" not in options:
        return url
    return parts._replace(query=urlencode(options | {"ssl_ca_certs": path})).geturl()

"""kopf's part: it lists and watches pools and their children, and fills the cache.

In: the API's events. Out: calls of the cache, marks for the resync. Only handlers of plain events,
which keep nothing in the objects: no finalizers, no annotations. No indexes either: kopf would hold
every object until all kinds were listed, and that was half of the memory. kopf lists anew after a
watch was down too long, and does not say what is gone since: whatever it lists is a mark for the
resync, which compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import kopf

from baton_operator.kube.connection import login
from baton_operator.kube.kinds import POOL, WATCHED, ObjectKind, key_of
from baton_operator.names import POOL_LABEL
from baton_operator.state.cache import Cache, PoolKey

PREFIX = "operator.baton.dev"
REQUEST_TIMEOUT_S = 30.0
# Bookmarks come every minute: without any the connection is dead, whatever TCP says.
SILENCE_S = 70.0
# The server ends a watch after so long, and so evens out where watches go.
WATCH_S = 600
# An object's task in kopf, and with it the object's body, lives on so long after an event.
IDLE_S = 0.1
# Objects per page of a listing: 2,400 at once were 60 MiB.
PAGE = 50
EXIT_S = 0.5


class Backoffs:
    """Pauses between tries of kopf's own requests: as many as it takes. A server that is away must
    not end the operator. `failed` is told of each try that failed and is about to be repeated."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed

    def __iter__(self) -> Iterator[float]:
        # kopf takes a pause before each try, so it comes back for another one after a failure.
        for pause in chain((0.2, 0.5, 1, 2, 3), repeat(5)):
            yield pause
            self._failed()


class NoDiffs(kopf.DiffBaseStorage):
    """kopf would copy each object of each event for a comparison that nobody asks for: a fifth of
    the operator's computing time."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


def watch_settings(
    namespaces: tuple[str, ...], failed: Callable[[], None]
) -> kopf.OperatorSettings:
    """`failed` is told of each of kopf's requests that had no success."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = WATCH_S
    settings.watching.inactivity_timeout = SILENCE_S
    settings.watching.connect_timeout = REQUEST_TIMEOUT_S
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.error_backoffs = Backoffs(failed)
    settings.queueing.idle_timeout = IDLE_S
    settings.queueing.exit_timeout = EXIT_S
    settings.posting.enabled = False
    settings.peering.standalone = True
    # With namespaces given nothing of the whole cluster is read; else CRDs that come are noticed.
    settings.scanning.disabled = bool(namespaces)
    # Else it would kill this process 10 minutes after a restart of kopf inside of it.
    settings.process.ultimate_exiting_timeout = None
    # Nothing is kept in objects; should kopf ever begin to, then under names of our own.
    settings.persistence.finalizer = f"{PREFIX}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    settings.persistence.diffbase_storage = NoDiffs()
    for kind in WATCHED:
        settings.watching.label_selectors[_selector(kind)] = POOL_LABEL
    return settings


def watch_registry(
    cache: Cache, listed: Callable[[ObjectKind], None], probes: dict[str, Callable[[], float]]
) -> kopf.OperatorRegistry:
    """`listed` is told the kind of each object that came in a listing. `probes` are asked when
    somebody asks for /healthz; one that raises makes it answer 500."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    for kind in WATCHED:
        _watch_children(registry, kind, cache, listed)
    _watch_pools(registry, cache, listed)
    for name, probe in probes.items():
        _probe(registry, name, probe)
    return registry


def _watch_children(
    registry: kopf.OperatorRegistry,
    kind: ObjectKind,
    cache: Cache,
    listed: Callable[[ObjectKind], None],
) -> None:
    @kopf.on.event(*_selector(kind), registry=registry, id=f"event-{kind.plural}")
    async def event(event: kopf.RawEvent, **_: Any) -> None:
        body: dict[str, Any] = dict(event["object"])
        if event["type"] == "DELETED":
            metadata = body["metadata"]
            pool = PoolKey(metadata["namespace"], metadata["labels"].get(POOL_LABEL, ""))
            cache.lose_child(pool, key_of(body), metadata["uid"])
            return
        cache.see_child(body, listed=event["type"] is None)
        if event["type"] is None:
            listed(kind)


def _watch_pools(
    registry: kopf.OperatorRegistry, cache: Cache, listed: Callable[[ObjectKind], None]
) -> None:
    @kopf.on.event(*_selector(POOL), registry=registry, id="event-pools")
    async def event(event: kopf.RawEvent, **_: Any) -> None:
        body: dict[str, Any] = dict(event["object"])
        metadata = body["metadata"] = dict(body["metadata"])
        if event["type"] == "DELETED":
            cache.lose_pool(PoolKey(metadata["namespace"], metadata["name"]), metadata["uid"])
            return
        cache.see_pool(body, listed=event["type"] is None)
        if event["type"] is None:
            listed(POOL)


def _probe(registry: kopf.OperatorRegistry, name: str, probe: Callable[[], float]) -> None:
    @kopf.on.probe(registry=registry, id=name, errors=kopf.ErrorsMode.PERMANENT)
    async def ask(**_: Any) -> float:
        return probe()


def _selector(kind: ObjectKind) -> tuple[str, str, str]:
    return kind.group, kind.version, kind.plural

"""kopf's part: lists and watches pools and their children, and fills the cache.

In: the API's events. Out: calls of the cache, marks for the resync. It uses only plain event
handlers, which store nothing in the objects: no finalizers, no annotations. It uses no indexes,
because kopf would hold every object until all kinds were listed: half of the operator's memory. For
daemons, timers and peering see "What Baton uses of kopf" in docs/architecture.md.
kopf lists again after a watch was down too long and does not report deletions meanwhile, so each
listing is a mark for the resync, which compares.
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
# Bookmarks come every minute: after a longer silence the connection is dead, whatever TCP says.
SILENCE_S = 70.0
# Seconds after which the server ends a watch, so that watches spread over API servers again.
WATCH_S = 600
# Seconds for which kopf keeps an object's task, and with it the object's body, after an event.
IDLE_S = 0.1
# Objects per page of a listing: 2,400 at once were 60 MiB.
PAGE = 50
EXIT_S = 0.5


class Backoffs:
    """Endless pauses between retries of kopf's own requests: an API server that is away must not
    end the operator. `failed` is called for each failed attempt that will be retried."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed

    def __iter__(self) -> Iterator[float]:
        # kopf takes a pause from here before each attempt, so the next call follows a failure.
        for pause in chain((0.2, 0.5, 1, 2, 3), repeat(5)):
            yield pause
            self._failed()


class NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from copying each object for a diff that nothing uses: a fifth of the operator's
    CPU time."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


def watch_settings(
    namespaces: tuple[str, ...], failed: Callable[[], None]
) -> kopf.OperatorSettings:
    """`failed` is called for each failed request of kopf."""
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
    # With namespaces given no cluster-wide object is read; otherwise kopf notices new CRDs.
    settings.scanning.disabled = bool(namespaces)
    # Otherwise kopf would kill this process 10 minutes after its own restart in it.
    settings.process.ultimate_exiting_timeout = None
    # Nothing is stored in objects. kopf removes a finalizer of this name from an object that needs
    # none: with its default name it would remove that of another operator.
    settings.persistence.finalizer = f"{PREFIX}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    settings.persistence.diffbase_storage = NoDiffs()
    for kind in WATCHED:
        settings.watching.label_selectors[_selector(kind)] = POOL_LABEL
    return settings


def watch_registry(
    cache: Cache, listed: Callable[[ObjectKind], None], probes: dict[str, Callable[[], float]]
) -> kopf.OperatorRegistry:
    """`listed` is called with the kind of each object that came from a listing. `probes` run for
    each request of /healthz; if one raises, the answer is 500."""
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

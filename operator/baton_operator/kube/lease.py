"""Leader election among replicas with a Lease, as in other controllers.

In: the API, an identity, a clock. Out: `acquire_lease` returns when this replica becomes the
leader, `renew_until_lost` when it no longer is. A follower trusts no other machine's clock: a lease
is free once it has been unchanged for its whole duration on the follower's own clock. A leader that
cannot renew stops acting before that: `RENEW_FOR_S` is less than `DURATION_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from baton_operator.kube.client import Api, ApiError, Conflict
from baton_operator.kube.kinds import LEASE, ChildKey
from baton_operator.kube.objects import Body

logger = logging.getLogger(__name__)

DURATION_S = 15
RENEW_FOR_S = 10.0
PERIOD_S = 2.0


class Lease:
    """`place` is the Lease's namespace and name: each installation has its own. `clock` returns
    monotonic seconds; `now` the time of day that is written to the Lease."""

    def __init__(
        self,
        api: Api,
        place: tuple[str, str],
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._api = api
        self._key = ChildKey(LEASE.api_version, LEASE.kind, *place)
        self._identity = identity
        self._clock = clock
        self._now = now
        self._seen: tuple[Any, float] = (None, clock())

    async def acquire_lease(self) -> None:
        """Return once this replica holds the lease."""
        logger.info("waiting for lease %s/%s", self._key.namespace, self._key.name)
        while not await self._try():
            await asyncio.sleep(PERIOD_S)
        logger.info("%s is now the leader", self._identity)

    async def renew_until_lost(self) -> None:
        """Renew the lease. Return when another replica holds it, or after RENEW_FOR_S without a
        successful renewal."""
        renewed = self._clock()
        while (left := renewed + RENEW_FOR_S - self._clock()) > 0:
            await asyncio.sleep(min(PERIOD_S, left))
            begun = self._clock()
            try:
                async with asyncio.timeout(max(0.0, renewed + RENEW_FOR_S - begun)):
                    done = await self._try()
            except TimeoutError:
                break
            if done:
                renewed = begun
            elif self._holder() not in ("", self._identity):
                break
        logger.warning("%s is no longer the leader", self._identity)

    async def release_lease(self) -> None:
        """Release the lease, so that the next leader need not wait for its expiry. Best effort."""
        try:
            async with asyncio.timeout(PERIOD_S):
                body = await self._api.get(self._key)
                if body is not None and body["spec"].get("holderIdentity") == self._identity:
                    body["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._api.update(body)
        except (ApiError, TimeoutError) as error:
            logger.info("cannot release the lease: %s", error)

    async def _try(self) -> bool:
        """Acquire or renew the lease if it is free or ours. Return whether that succeeded."""
        try:
            async with asyncio.timeout(RENEW_FOR_S / 2):
                body = await self._api.get(self._key)
                if body is None:
                    await self._api.create(self._body())
                    return True
                self._look(body)
                if not self._free(body):
                    return False
                await self._api.update(self._taken(body))
                return True
        except Conflict:
            return False  # another replica was faster
        except (ApiError, TimeoutError) as error:
            logger.warning("lease %s/%s: %s", self._key.namespace, self._key.name, error)
            return False

    def _look(self, body: Body) -> None:
        version = body["metadata"]["resourceVersion"]
        if self._seen[0] is None or self._seen[0]["metadata"]["resourceVersion"] != version:
            self._seen = (body, self._clock())

    def _holder(self) -> str:
        holder: str = ((self._seen[0] or {}).get("spec") or {}).get("holderIdentity") or ""
        return holder

    def _free(self, body: Body) -> bool:
        if self._holder() in ("", self._identity):
            return True
        duration: float = body["spec"].get("leaseDurationSeconds", DURATION_S)
        return self._clock() - self._seen[1] > duration

    def _body(self) -> Body:
        place = {"name": self._key.name, "namespace": self._key.namespace}
        head = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": place}
        return head | {"spec": self._spec(0)}

    def _taken(self, body: Body) -> Body:
        spec = body.get("spec") or {}
        changes = spec.get("leaseTransitions", 0) + (self._holder() != self._identity)
        taken = self._spec(changes)
        if self._holder() == self._identity:
            taken["acquireTime"] = spec.get("acquireTime", taken["acquireTime"])
        return body | {"spec": taken}

    def _spec(self, transitions: int) -> dict[str, Any]:
        now = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

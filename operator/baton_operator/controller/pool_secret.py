"""The Secret with a pool's credentials, as last read or applied.

In: the API. Out: the credentials, or the refusal to read them. Nothing watches Secrets, so the
pool's is read again when its last read is SECRET_S old.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable

from baton_operator.api.pool import Credentials
from baton_operator.builders.credentials import credentials_of, new_credentials
from baton_operator.kube.client import Api, Refused
from baton_operator.kube.kinds import SECRET, ChildKey
from baton_operator.kube.objects import Body
from baton_operator.names import child_name
from baton_operator.state.cache import PoolKey
from baton_operator.state.child import CachedChild, read_child
from baton_operator.state.observed import Refusal
from baton_operator.status.findings.applied import refusal_words

logger = logging.getLogger(__name__)
# Maximum age of what is known of a pool's Secret, so at most one request for it in this time. The
# resync reconciles pools that have no events.
SECRET_S = 30.0


class PoolSecret:
    """For the pool with this `uid`. `child` is the Secret; None if it does not exist."""

    def __init__(self, key: PoolKey, uid: str, api: Api, clock: Callable[[], float]) -> None:
        self._pool = key
        self._uid = uid
        self._api = api
        self._clock = clock
        self._key = ChildKey(
            SECRET.api_version, SECRET.kind, key.namespace, child_name(key.name, "auth")
        )
        self.child: CachedChild | None = None
        self._read_at = -math.inf
        self._credentials: Credentials | None = None

    async def log_in(self) -> tuple[Credentials, tuple[Refusal, ...]]:
        """The credentials, or the refusal to read them. With a refusal nothing is created."""
        try:
            return await self._read_credentials(), ()
        except Refused as error:
            refusal = Refusal(child=self._key, code=error.code, message=error.message)
            logger.warning("pool %s: refused: %s", self._pool, refusal_words(refusal))
            return Credentials(redis_password="", link_token="", tenant_secret=""), (refusal,)

    def see_applied(self, answer: Body) -> CachedChild:
        """The answer to an apply of the Secret."""
        self.child, self._read_at = read_child(answer), self._clock()
        return self.child

    async def _read_credentials(self) -> Credentials:
        """The credentials in the pool's Secret. If the Secret is missing, those known from before;
        if none are known, or the Secret is damaged, new ones. The Secret's manifest is applied
        before anything that uses them."""
        now, last = self._clock(), self.child
        # A Secret that is missing or belongs to an earlier pool will change soon.
        is_ours = last is not None and last.owner == self._uid
        if self._credentials is not None and is_ours and now - self._read_at < SECRET_S:
            return self._credentials
        body = await self._api.get(self._key)
        self.child, self._read_at = None if body is None else read_child(body), now
        if self._credentials is not None and _version_of(self.child) == _version_of(last):
            return self._credentials  # these may be new and not yet in the cluster
        stored = credentials_of(body, os.urandom, self._credentials)
        kept = self._credentials if body is None else None
        self._credentials = stored or kept or new_credentials(os.urandom)
        return self._credentials


def _version_of(secret: CachedChild | None) -> tuple[str, int]:
    return ("", 0) if secret is None else (secret.uid, secret.version)

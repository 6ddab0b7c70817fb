"""Asks the pools' indexes beside the reconciling: an index that is silent shall delay no pool.

In: pools that were just looked at. Out: answers, each handed out once, after its pool was marked to
be looked at again; it is marked too when its index has fallen silent. Who is asked when is
`index_reader`'s to say. One pool of a namespace is asked at a time: one whose indexes never
answer keeps no other namespace waiting.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable

from baton_operator.api.pool import Pool
from baton_operator.api.status import PoolStatus
from baton_operator.controller.queue import WorkQueue
from baton_operator.kube.client import Api, ApiError
from baton_operator.kube.kinds import SECRET, ChildKey
from baton_operator.state.cache import PoolKey
from baton_operator.state.index_reader import Answer, IndexReader, Login
from baton_operator.state.observed import Observed

logger = logging.getLogger(__name__)
TURN_S = 0.2  # until a pool is tried again while another one of its namespace is asked
Subject = tuple[Pool, Observed, PoolStatus]


class IndexAsker:
    """One event loop's; `run` it in a few tasks."""

    def __init__(
        self,
        api: Api,
        reader: IndexReader,
        queue: WorkQueue[PoolKey],
        answered: Callable[[PoolKey], None],
    ) -> None:
        self._api = api
        self._reader = reader
        self._queue = queue
        self._answered = answered
        self._subjects: dict[PoolKey, Subject] = {}
        self._uids: dict[PoolKey, str] = {}  # whom the reader knows, whether it is asked now or not
        self._answers: dict[PoolKey, Answer] = {}
        self._asking: set[str] = set()

    def follow(self, key: PoolKey, pool: Pool, observed: Observed, status: PoolStatus) -> None:
        """Ask when it is time to."""
        if (before := self._uids.get(key, pool.uid)) != pool.uid:
            self._reader.forget(before)  # another pool has its name now
        self._uids[key] = pool.uid
        due_s = self._reader.due_in(pool, observed, status)
        if due_s is None:
            self._subjects.pop(key, None)
            return
        self._subjects[key] = (pool, observed, status)
        self._queue.add(key, due_s)

    def take_answer(self, key: PoolKey) -> Answer | None:
        """What came since the last look; None where nothing did."""
        return self._answers.pop(key, None)

    def silent(self, uid: str) -> bool:
        """Whether that pool's index has not answered several times in a row."""
        return self._reader.silent(uid)

    def forget(self, key: PoolKey) -> None:
        self._subjects.pop(key, None)
        self._answers.pop(key, None)
        if (uid := self._uids.pop(key, None)) is not None:
            self._reader.forget(uid)

    async def run(self) -> None:
        while True:
            key = await self._queue.take()
            if key.namespace in self._asking:
                self._queue.done(key)
                self._queue.add(key, TURN_S)
                continue
            self._asking.add(key.namespace)
            try:
                await self._ask(key)
            except ApiError as error:
                logger.info("pool %s: no login for its index: %s", key, error)
                self._queue.failed(key)
            except Exception:
                logger.exception("index of pool %s", key)
                self._queue.failed(key)
            else:
                self._queue.done(key)
            finally:
                self._asking.discard(key.namespace)

    async def _ask(self, key: PoolKey) -> None:
        subject = self._subjects.get(key)
        if subject is None:
            return
        pool, observed, status = subject
        login = await self._login(pool)
        was_silent = self._reader.silent(pool.uid)
        answer = await self._reader.read(pool, observed, status, login)
        newest = self._subjects.get(key)
        if newest is None:
            return  # forgotten meanwhile
        if answer is not None:
            self._answers[key] = answer
            self._answered(key)
        else:
            if self._reader.silent(pool.uid) and not was_silent:
                self._answered(key)  # that is to be said
            self.follow(key, *newest)

    async def _login(self, pool: Pool) -> Login | None:
        """Of an external store: as its nodes have it."""
        external = pool.spec.kv_store.external
        if external is None:
            return None
        login = await self._values(pool, external.secret_ref.name if external.secret_ref else "")
        authority = external.ca_secret_ref.name if external.ca_secret_ref else ""
        return Login(
            username=login.get("username", ""),
            password=login.get("password", ""),
            certificate=(await self._values(pool, authority)).get("ca.crt", ""),
        )

    async def _values(self, pool: Pool, name: str) -> dict[str, str]:
        if not name:
            return {}
        body = await self._api.get(ChildKey(SECRET.api_version, SECRET.kind, pool.namespace, name))
        data = (body or {}).get("data") or {}
        return {
            key: base64.b64decode(value).decode(errors="replace") for key, value in data.items()
        }

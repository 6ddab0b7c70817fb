"""Reads a pool's index in its own task, so that an index that hangs does not delay reconciles.

In: the pool of the last reconcile. Out: answers, each handed out once. An answer, or an index that
becomes silent, schedules the next reconcile. `index_reader` decides when to read.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable

from baton_operator.api.pool import Pool
from baton_operator.api.status import PoolStatus
from baton_operator.controller.due_time import DueTime
from baton_operator.kube.client import Api, ApiError
from baton_operator.kube.kinds import SECRET, ChildKey
from baton_operator.state.cache import PoolKey
from baton_operator.state.index_reader import IndexAnswer, IndexReader, Login
from baton_operator.state.observed import Observed
from baton_operator.state.store_check import StoreProblem

logger = logging.getLogger(__name__)
Subject = tuple[Pool, Observed, PoolStatus]


class IndexPoller:
    """The poller of one pool; one task runs it. `answered` schedules a reconcile of the pool."""

    def __init__(
        self,
        key: PoolKey,
        api: Api,
        reader: IndexReader,
        answered: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._key = key
        self._api = api
        self._reader = reader
        self._answered = answered
        self._due_time = DueTime(clock)
        self._subject: Subject | None = None
        self._answer: IndexAnswer | None = None

    @property
    def silent(self) -> bool:
        """Whether the last several reads in a row failed."""
        return self._reader.silent

    @property
    def problem(self) -> StoreProblem | None:
        """What the last read found wrong with an external store."""
        return self._reader.problem

    def schedule_read(self, pool: Pool, observed: Observed, status: PoolStatus) -> None:
        """Schedule the next read for this state of the pool, or stop reading if none is needed."""
        due_s = self._reader.due_in(pool, observed, status)
        if due_s is None:
            self.stop_reading()
            return
        self._subject = (pool, observed, status)
        self._due_time.request(due_s)

    def stop_reading(self) -> None:
        """Stop reading until `schedule_read` is called again."""
        self._subject = None

    def take_answer(self) -> IndexAnswer | None:
        """The answer that arrived since the last call; None if there is none."""
        answer, self._answer = self._answer, None
        return answer

    async def run(self) -> None:
        while True:
            await self._due_time.wait_until_due()
            self._due_time.begin()
            try:
                await self._ask()
            except ApiError as error:
                logger.info("pool %s: cannot read the login of its index: %s", self._key, error)
                self._due_time.fail()
            except Exception:
                logger.exception("index of pool %s", self._key)
                self._due_time.fail()
            else:
                self._due_time.succeed()

    async def _ask(self) -> None:
        if self._subject is None:
            return
        pool, observed, status = self._subject
        login = await self._login(pool)
        was_silent, last_problem = self._reader.silent, self._reader.problem
        answer = await self._reader.read(pool, observed, status, login)
        if self._subject is None:
            return  # `schedule_read` stopped the reads meanwhile
        if answer is not None:
            self._answer = answer
            self._answered()
            return
        silenced = self._reader.silent and not was_silent
        if silenced or self._reader.problem != last_problem:
            self._answered()  # the status must report it
        self.schedule_read(*self._subject)

    async def _login(self, pool: Pool) -> Login | None:
        """The login for an external store, from the same Secrets as its nodes use."""
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

"""A pool's routers on Kubernetes: which pods they are, and how to ask them.

In: a cluster, a pool's name, a key if the user has one. Out: routers that answer, through a port
forward. That passes a NetworkPolicy, needs no address of the pool outside the cluster, and leaves
the request's headers as they are.

The key is the user's, or else the pool's link token, which opens routes for operators of the pool,
also where tenants have keys. A user without the right to read its Secret goes on without a key,
which is enough to look at a pool whose tenants have none.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager

from baton_cli.errors import CommandError
from baton_cli.kubectl.cluster import Cluster, Json
from baton_cli.terminal.remote_router import Refused, RemoteRouter
from baton_operator.kube.objects import find_condition
from baton_operator.names import (
    COMPONENT_LABEL,
    POOL_LABEL,
    ROUTER_PORT,
    TOKEN_KEY,
    child_name,
)

KEY_VARIABLE = "BATON_API_KEY"
NOT_FOUND = 404
UNAVAILABLE = 503
NO_KEY = (401, 403)


class PoolRouters:
    def __init__(self, cluster: Cluster, pool: str, key: str) -> None:
        self._cluster = cluster
        self._pool = pool
        self._given = key

    @contextmanager
    def one(self) -> Iterator[RemoteRouter]:
        """Any router."""
        key = self._key()
        with self._reach(self._pods()[0], key) as router:
            try:
                yield router
            except Refused as error:
                raise self._explained(error, key) from error

    def ask_each(self, path: str, body: Json | None = None) -> Json:
        """The first answer of a router. A router that does not know the request or the node (404),
        or has no link to the node (503), leaves it to the next one."""
        key, refusal = self._key(), CommandError("no router answered")
        for pod in self._pods():
            with self._reach(pod, key) as router:
                try:
                    return router.ask(path, body)
                except Refused as error:
                    refusal = error
                    if error.status not in (NOT_FOUND, UNAVAILABLE):
                        raise self._explained(error, key) from error
        raise refusal

    def _pods(self) -> list[str]:
        """The names of the routers' pods that run, ready ones first: a router of a pool without a
        ready node is not ready, and knows the nodes. Raise CommandError if there are none."""
        labels = f"{POOL_LABEL}={self._pool},{COMPONENT_LABEL}=router"
        bodies = self._cluster.read("pods", f"--selector={labels}")["items"]
        running = sorted((body for body in bodies if _runs(body)), key=_is_ready, reverse=True)
        if not running:
            raise CommandError(
                f"no router of pool {self._pool} runs here; `kubectl baton why {self._pool}` says"
                " why, and -n names another namespace"
            )
        return [body["metadata"]["name"] for body in running]

    def _key(self) -> str:
        if self._given:
            return self._given
        try:
            secret = self._cluster.read("secret", child_name(self._pool, "auth"))
            return base64.b64decode(secret["data"][TOKEN_KEY]).decode()
        except (CommandError, KeyError, TypeError, binascii.Error, UnicodeDecodeError):
            return ""

    def _explained(self, error: Refused, key: str) -> CommandError:
        """The router's error, and what helps if it is about the key."""
        if error.status not in NO_KEY or self._given:
            return error
        remedy = f"set {KEY_VARIABLE} to a key of the pool, to an admin's to drain a node"
        if not key:
            secret = child_name(self._pool, "auth")
            remedy += f", or get the right to read Secret {secret}"
        return CommandError(f"{error}; {remedy}")

    @contextmanager
    def _reach(self, pod: str, key: str) -> Iterator[RemoteRouter]:
        with self._cluster.forward(pod, ROUTER_PORT) as url:
            yield RemoteRouter(url, key)


def _runs(pod: Json) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"


def _is_ready(pod: Json) -> bool:
    return find_condition(pod["status"], "Ready").get("status") == "True"

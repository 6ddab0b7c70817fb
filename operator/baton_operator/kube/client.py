"""The Kubernetes API as the operator needs it: raw objects in, raw objects out.

It uses the official client's connections and logins but not its models, which cost memory and drop
the fields of newer servers. Every request has a timeout and is counted. None is retried here: the
caller reconciles the pool again.

ApiError
|-- ApiUnavailable    no answer, 5xx, or a login that is being renewed: retry later
|   |-- TooManyRequests   429: `retry_after_s`
|   `-- ServerFailed      5xx: `code`, `message`; perhaps only this request fails
|-- Conflict          409: someone else changed the object: read it again
`-- Refused           `code`, `message` of the server: a retry without a change is useless
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration

from baton_operator.kube.kinds import ChildKey, ObjectKind, kind_of
from baton_operator.kube.objects import Body

logger = logging.getLogger(__name__)

Verb = Literal["apply", "create", "delete", "get", "list", "patch", "update"]
FIELD_MANAGER = "baton-operator"
TIMEOUT_S = 15.0
UNANSWERED = "error"
_METHODS = {
    "apply": "PATCH",
    "create": "POST",
    "delete": "DELETE",
    "patch": "PATCH",
    "update": "PUT",
}
_CONTENT = {
    "apply": "application/apply-patch+yaml",  # JSON is YAML
    "patch": "application/merge-patch+json",
}
_ANOTHER_UID = "metadata.uid"  # field in the error if a patch names another uid than the object's
_NO_PATH = "404 page not found"  # the answer for a kind that is not installed
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class ApiError(Exception):
    """A request failed."""


class ApiUnavailable(ApiError):
    """The request is valid but got no usable answer."""


class TooManyRequests(ApiUnavailable):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerFailed(ApiUnavailable):
    """The cause may concern a single object, such as an admission webhook that is down."""

    def __init__(self, what: str, code: int, message: str) -> None:
        super().__init__(f"{what}: {code} {message}")
        self.code = code
        self.message = message


class Conflict(ApiError):
    """The object changed since it was read."""


class Refused(ApiError):
    """`reason` is the reason of the server's Status object, "" if there is none."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason


class Api:
    """One client for all tasks of an event loop."""

    def __init__(
        self, configuration: Configuration, count: Callable[[Verb, str], None], timeout_s: float
    ) -> None:
        """`count` gets each request's verb and its HTTP code, or UNANSWERED."""
        self._client: Any = ApiClient(configuration)  # half typed
        self._client.user_agent = FIELD_MANAGER
        self._count = count
        self.missing: set[ObjectKind] = set()
        self.date = ""  # the header Date of the last answer
        self._timeout_s = timeout_s

    async def close(self) -> None:
        await self._client.close()

    async def apply(self, body: Body) -> Body:
        """Create or update by server-side apply; overrides other managers of these fields."""
        try:
            return await self._apply(_path(body), body)
        except Refused as error:
            if error.code == 404 and "page not found" in error.message:
                what = f"{body['kind']} of {body['apiVersion']}"
                raise Refused(
                    404, f"the cluster does not have {what}; install its CustomResourceDefinition"
                ) from error
            raise

    async def apply_status(self, body: Body) -> Body:
        return await self._apply(_path(body) + "/status", body)

    async def create(self, body: Body) -> Body:
        path = kind_of(body).path(body["metadata"]["namespace"])
        return await self._send("create", path, body, {"fieldManager": FIELD_MANAGER})

    async def update(self, body: Body) -> Body:
        """Replace the whole object. Raise Conflict if its resourceVersion is not the newest."""
        return await self._send("update", _path(body), body, {"fieldManager": FIELD_MANAGER})

    async def set_replicas(self, key: ChildKey, uid: str, version: int, replicas: int) -> Body:
        """Set only the replicas, for an object whose manifest is no longer known. Raise Conflict if
        `version` is not its newest or the object is gone."""
        path = kind_of(key).path(key.namespace, key.name)
        metadata = {"uid": uid, "resourceVersion": str(version)}
        body = {"metadata": metadata, "spec": {"replicas": replicas}}
        try:
            return await self._send("patch", path, body, {"fieldManager": FIELD_MANAGER})
        except Refused as error:
            another = error.code == 422 and _ANOTHER_UID in error.message
            if error.code == 404 or another:
                raise Conflict(f"{key.kind} {key.name} is gone") from error
            raise

    async def get(self, key: ChildKey) -> Body | None:
        """None if the object, or an optional kind, does not exist. Any other 404 raises
        ApiUnavailable: a caller that wrongly believes an object gone would create it again."""
        kind = kind_of(key)
        path = kind.path(key.namespace, key.name)
        try:
            return await self._send("get", path)
        except Refused as error:
            if error.code != 404:
                raise
            if error.reason == "NotFound" or (kind.optional and error.message == _NO_PATH):
                return None
            raise ApiUnavailable(f"get {path}: {error}") from error

    async def delete(self, key: ChildKey, uid: str) -> None:
        """Delete the object with this uid. It is a success if that object is already gone."""
        path = kind_of(key).path(key.namespace, key.name)
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._send("delete", path, body)
        except Conflict:
            logger.debug("another object replaced %s", key)
        except Refused as error:
            if error.code != 404:
                raise

    async def list_metadata(
        self, kind: ObjectKind, namespace: str | None, selector: str = ""
    ) -> list[Body]:
        """The `metadata` of each object. Empty for an optional kind that is not installed, which
        is then added to `missing`."""
        query = {"labelSelector": selector} if selector else {}
        try:
            listed = await self._send(
                "list", kind.path(namespace), query=query, accept=_METADATA_ONLY
            )
        except Refused as error:
            if error.code == 404 and kind.optional:
                self.missing.add(kind)
                return []
            raise
        self.missing.discard(kind)
        # The server may encode an empty list as null.
        return [item["metadata"] for item in listed["items"] or ()]

    async def list_where(
        self, kind: ObjectKind, namespace: str, fields: Mapping[str, str]
    ) -> list[Body]:
        """Whole objects that match these field selectors."""
        selector = ",".join(f"{name}={value}" for name, value in fields.items())
        listed = await self._send("list", kind.path(namespace), query={"fieldSelector": selector})
        return list(listed["items"] or ())

    async def call(
        self,
        verb: Verb,
        path: str,
        body: Body | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Body:
        """One request for what the table of kinds does not have."""
        return await self._send(verb, path, body, query)

    async def _apply(self, path: str, body: Body) -> Body:
        return await self._send("apply", path, body, {"fieldManager": FIELD_MANAGER, "force": True})

    async def _send(
        self,
        verb: Verb,
        path: str,
        body: Body | None = None,
        query: Mapping[str, object] | None = None,
        accept: str = "application/json",
    ) -> Body:
        code = UNANSWERED
        try:
            async with asyncio.timeout(self._timeout_s):
                status, headers, data = await self._exchange(verb, path, body, query or {}, accept)
            code, self.date = str(status), headers.get("Date", "")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            what = str(error) or f"no answer within {self._timeout_s:g} s"
            raise ApiUnavailable(f"{verb} {path}: {what}") from error
        finally:
            self._count(verb, code)
        if status < 300:
            decoded: Body = msgspec.json.decode(data)
            return decoded
        raise _error(f"{verb} {path}", status, headers, data)

    async def _exchange(
        self, verb: Verb, path: str, body: Body | None, query: Mapping[str, object], accept: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = {
            "Accept": accept,
            "Content-Type": _CONTENT.get(verb, "application/json"),
            "User-Agent": self._client.user_agent,
        }
        settings = (await self._client.configuration.auth_settings()).values()
        headers |= {setting["key"]: setting["value"] for setting in settings}
        parameters = {
            key: str(value).lower() if value is True else value for key, value in query.items()
        }
        url = self._client.configuration.host + quote(path)
        url += f"?{urlencode(parameters)}" if parameters else ""
        response = await self._client.call_api(
            _METHODS.get(verb, "GET"), url, header_params=headers, body=body
        )
        return response.status, response.headers, await response.read()


def _path(body: Body) -> str:
    return kind_of(body).path(body["metadata"]["namespace"], body["metadata"]["name"])


def _error(what: str, status: int, headers: Mapping[str, str], data: bytes) -> ApiError:
    message, reason = _message(data)
    if status == 429:
        return TooManyRequests(f"{what}: {message}", _seconds(headers.get("Retry-After")))
    if status >= 500:
        return ServerFailed(what, status, message)
    if status == 401:
        return ApiUnavailable(f"{what}: {status} {message}")
    if status == 409:
        return Conflict(f"{what}: {message}")
    return Refused(status, message, reason)


def _message(data: bytes) -> tuple[str, str]:
    """Message and reason of a Status object. The answer for an unknown path is plain text."""
    try:
        status = msgspec.json.decode(data)
        return str(status["message"]), str(status.get("reason", ""))
    except (msgspec.DecodeError, KeyError, TypeError):
        return data[:200].decode(errors="replace").strip(), ""


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 1.0))
    except ValueError:
        return 1.0  # an HTTP date; a busy server normally sends seconds

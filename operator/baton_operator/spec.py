"""What a user may write in an InferencePool's `spec`: only fields that something obeys.

In: the object as the API gives it. Out: a frozen `PoolSpec`, or SpecError. Keys are camelCase in
YAML, snake_case here; the CRD's schema will be generated from these records. Where a check needs
more than a type, `__post_init__` raises ValueError("field: what is wrong") and `read_spec` puts
the path before it.

    SpecError   the pool is not what can be built; one line: field, offending value, what to write
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton_kvstore.endpoint import parse_endpoint
from baton_kvstore.errors import StoreMisconfigured
from baton_kvstore.settings import StoreSettings

EngineKind = Literal["torch", "sim"]
DType = Literal["auto", "float32", "bfloat16"]
Handoff = Literal["auto", "always", "never"]
MissingRole = Literal["aggregate", "queue", "fail"]
LEAST_STORE_MEMORY = 64 << 20
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


class SpecError(Exception):
    """Final until the user edits the pool."""


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """A part of the spec. mypy wants `frozen` said again by each, msgspec does not."""


class ModelSpec(_Record, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="a Hugging Face folder in the node's container")] = ""

    def __post_init__(self) -> None:
        if self.path and not self.path.startswith("/"):
            raise ValueError(
                f"path: {self.path!r} is no absolute path; write the model's folder as the node's"
                " container sees it"
            )


class EngineSpec(_Record, frozen=True, kw_only=True):
    """Numbers that all nodes share: with other ones their KV would not be interchangeable."""

    kind: Annotated[EngineKind, Meta(description="the real engine, or a simulated one")] = "torch"
    dtype: Annotated[
        DType, Meta(description="auto: each node decides; nodes that differ exchange no KV")
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1, description="tokens per KV block")] = 16
    chunk_blocks: Annotated[int, Meta(ge=1, description="blocks moved as one value")] | None = None
    max_model_len: Annotated[int, Meta(ge=1, description="prompt + answer, tokens")] | None = None


class RoleSpec(_Record, frozen=True, kw_only=True):
    replicas: Annotated[int, Meta(ge=0, description="nodes of this role")] = 1


class ManagedStore(_Record, frozen=True, kw_only=True):
    """Redis servers that belong to the pool: one index and `data_instances` for KV bytes."""

    memory: Annotated[int | str, Meta(description="for KV, of each data instance")] = "1Gi"
    data_instances: Annotated[int, Meta(ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        if self.memory_bytes < LEAST_STORE_MEMORY:
            raise ValueError(f"memory: {self.memory} is too small; write at least 64Mi")

    @property
    def memory_bytes(self) -> int:
        match = _QUANTITY.fullmatch(str(self.memory))
        if match is None:
            raise ValueError(f"memory: {self.memory!r} is no quantity; write 1Gi, 512Mi or bytes")
        return int(float(match[1]) * _UNITS.get(match[2], 1))


class ExternalStore(_Record, frozen=True, kw_only=True):
    """Somebody else's Redis. The order of `data_urls` counts: new ones are appended."""

    index_url: str
    data_urls: Annotated[tuple[str, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        _check_url("indexUrl", self.index_url)
        for position, url in enumerate(self.data_urls):
            _check_url(f"dataUrls[{position}]", url)
        try:
            StoreSettings(index_url=self.index_url, data_urls=self.data_urls).check()
        except StoreMisconfigured as error:
            raise ValueError(f"dataUrls: {error}") from error


class KVStoreSpec(_Record, frozen=True, kw_only=True):
    managed: ManagedStore | None = None
    external: ExternalStore | None = None

    def __post_init__(self) -> None:
        if self.managed is not None and self.external is not None:
            raise ValueError("external: given beside managed; keep one of the two")


class PoolSpec(_Record, frozen=True, kw_only=True):
    model: ModelSpec = ModelSpec()
    engine: EngineSpec = EngineSpec()
    prefill: RoleSpec = RoleSpec()
    decode: RoleSpec = RoleSpec()
    kv_store: KVStoreSpec = KVStoreSpec()
    handoff: Annotated[
        Handoff, Meta(description="when a prefill node computes a decode node's prompt")
    ] = "auto"
    missing_role_policy: Annotated[
        MissingRole,
        Meta(
            description="no node of a role is ready: the other role does its work, or new"
            " requests wait for one, or fail"
        ),
    ] = "aggregate"

    def __post_init__(self) -> None:
        if self.engine.kind == "torch" and not self.model.path:
            raise ValueError(
                "model.path: missing; write the model's folder in the node's container, or"
                " engine.kind: sim"
            )
        if self.prefill.replicas + self.decode.replicas == 0:
            raise ValueError(
                "decode.replicas: 0, and prefill.replicas too: nobody could answer; write 1"
            )


def read_spec(spec: Any) -> PoolSpec:
    """Raise SpecError for what is not a spec."""
    try:
        return msgspec.convert(spec, PoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(_explain(str(error), spec, error.__cause__ is not None)) from error


def _check_url(name: str, url: str) -> None:
    if "," in url:
        raise ValueError(f"{name}: there is a comma in it; write one URL per item")
    try:
        endpoint = parse_endpoint(url)
    except StoreMisconfigured as error:
        raise ValueError(f"{name}: {error}") from error
    if endpoint.username or endpoint.password:
        raise ValueError(
            f"{name}: {endpoint.label} is given with a login, which all who may read the pool could"
            " read; leave it out (secrets are not supported yet)"
        )
    if endpoint.kind == "unix":
        raise ValueError(f"{name}: no pod reaches {url}; write redis://host:port or rediss://")


_LOCATED = re.compile(r"(?P<what>.*?)(?: - at .*?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_KEY = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


def _explain(message: str, spec: Any, ours: bool) -> str:
    """msgspec's words, or those of a __post_init__ (`ours`), as field, value, remedy."""
    located = _LOCATED.fullmatch(message)
    assert located is not None, message
    what, path = located["what"], located["path"] or ""
    field = f"spec{path}"
    if ours:
        return f"{field}.{what}"
    steps = re.findall(r"[^.\[\]]+", path)
    if key := _KEY.fullmatch(what):
        if key[1] == "missing required":
            return f"{field}.{key[2]}: missing"
        return f"{field}.{key[2]}: there is no such field; known are {', '.join(_known(steps))}"
    for step in steps:
        spec = spec[step] if isinstance(spec, Mapping) else spec[int(step)]
    # What is in the place of a URL may hold a password.
    value = "what is written" if "@" in repr(spec) else repr(spec)
    return f"{field}: {value} is wrong: {what[0].lower()}{what[1:]}{_choices(steps)}"


def _hint(steps: list[str]) -> Any:
    """The type at a path of keys in YAML's spelling."""
    hint: Any = PoolSpec
    for step in steps:
        record = next(iter(_records(hint)), None)
        if record is None:
            break  # a list's item
        hint = next(f.type for f in msgspec.structs.fields(record) if f.encode_name == step)
    return hint


def _records(hint: Any) -> list[type[_Record]]:
    kinds = typing.get_args(hint) or (hint,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, _Record)]


def _known(steps: list[str]) -> list[str]:
    [record] = _records(_hint(steps))
    return [item.encode_name for item in msgspec.structs.fields(record)]


def _choices(steps: list[str]) -> str:
    hint = _hint(steps)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    literal = typing.get_origin(hint) is Literal
    return f"; write {' or '.join(typing.get_args(hint))}" if literal else ""

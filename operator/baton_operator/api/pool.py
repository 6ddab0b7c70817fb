"""One InferencePool as all folders see it: whose it is, what it wants, what serves it.

In: the resource as the API gives it, how the operator was installed, the pool's secrets.
Out: a `Pool`, or one line that says what to write instead.

SpecError   the pool is not what can be built; one line: field, offending value, what to write
"""

from __future__ import annotations

import hashlib
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from baton_operator.api.fields import Record
from baton_operator.api.pool_spec import PoolSpec
from baton_operator.names import LONGEST_POOL_NAME, OWN_PREFIX, POOL_NAME


class SpecError(Exception):
    """Final until the user edits the pool."""


class Images(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Full names with versions. `redis` is redis-server or Valkey's, version 7 or later. `sim` is
    for nodes that simulate their model and has no torch; "": `node`, which can do it too."""

    node: str
    router: str
    redis: str
    sim: str = ""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What all pools of one operator share. `namespace` is the operator's own ("" outside a
    cluster): its pods may reach index and routers. `pull_policy` "" leaves it to Kubernetes."""

    images: Images
    namespace: str = ""
    pull_policy: str = ""
    pull_secrets: tuple[str, ...] = ()


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Made once per pool and kept in its Secret. Hex digits, so that a URL can hold them."""

    redis_password: str
    link_token: str
    tenant_secret: str

    def __repr__(self) -> str:
        return "Credentials(...)"

    def digest(self, *more: str) -> str:
        """Names what every pod is made with, and `more` that only this one is, without telling it:
        pods made with others are replaced."""
        text = "\n".join((self.redis_password, self.link_token, *more))
        return hashlib.sha256(text.encode()).hexdigest()[:10]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    namespace: str
    uid: str
    generation: int
    spec: PoolSpec
    installation: Installation
    credentials: Credentials

    @property
    def key(self) -> str:
        """The pool's name in Redis, which pools of other namespaces may share."""
        return f"{self.namespace}.{self.name}"

    @property
    def node_image(self) -> str:
        images = self.installation.images
        return (self.spec.engine.kind == "sim" and images.sim) or images.node


def read_pool(
    resource: Mapping[str, Any], installation: Installation, credentials: Credentials
) -> Pool:
    """Raise SpecError naming the field that cannot be obeyed."""
    metadata = resource["metadata"]
    name = metadata["name"]
    if POOL_NAME.fullmatch(name) is None or len(name) > LONGEST_POOL_NAME:
        raise SpecError(
            f"metadata.name: {name!r} cannot begin the names of services; write at most"
            f" {LONGEST_POOL_NAME} of a-z, 0-9 and '-', a letter first"
        )
    spec = read_spec(resource.get("spec", {}))
    _check_pod_templates(spec)
    return Pool(
        name=name,
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        spec=spec,
        installation=installation,
        credentials=credentials,
    )


def _check_pod_templates(spec: PoolSpec) -> None:
    """Selectors, policies and roll-outs go by our own labels and annotations."""
    managed = spec.kv_store.managed
    templates = {
        "prefill": spec.prefill.pod_template,
        "decode": spec.decode.pod_template,
        "router": spec.router.pod_template,
        "kvStore.managed": managed.pod_template if managed is not None else {},
    }
    for part, template in templates.items():
        _check_kept(f"spec.{part}.podTemplate", template, "metadata")
        metadata = template.get("metadata")
        # Other things than a mapping are for the API server to refuse.
        metadata = metadata if isinstance(metadata, Mapping) else {}
        for kind in ("labels", "annotations"):
            _check_kept(f"spec.{part}.podTemplate.metadata", metadata, kind)
            words = metadata.get(kind)
            names = words if isinstance(words, Mapping) else ()
            ours = next((name for name in names if name.startswith(OWN_PREFIX)), None)
            if ours is not None:
                raise SpecError(
                    f"spec.{part}.podTemplate.metadata.{kind}: {ours!r} is set by the operator;"
                    f" write names that do not begin with {OWN_PREFIX}"
                )


def _check_kept(field: str, parent: Mapping[str, Any], key: str) -> None:
    """null would remove what the operator wrote there."""
    if key in parent and parent[key] is None:
        raise SpecError(
            f"{field}.{key}: null would remove what the operator set; leave it out, or write names"
            f" that do not begin with {OWN_PREFIX}"
        )


def read_spec(spec: Any) -> PoolSpec:
    """Raise SpecError for what is not a spec."""
    try:
        return msgspec.convert(spec, PoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(_explain(str(error), spec, error.__cause__ is not None)) from error


_LOCATED = re.compile(r"(?P<what>.*?)(?: - at .*?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def _explain(message: str, spec: Any, ours: bool) -> str:
    """msgspec's words, or those of a __post_init__ (`ours`), as field, value, remedy."""
    located = _LOCATED.fullmatch(message)
    assert located is not None, message
    what, path = located["what"], located["path"] or ""
    field = f"spec{path}"
    if ours:
        return f"{field}.{what}"
    if key := _MISSING.fullmatch(what):
        return f"{field}.{key[1]}: missing"
    steps = re.findall(r"[^.\[\]]+", path)
    for step in steps:
        spec = spec[step] if isinstance(spec, Mapping) else spec[int(step)]
    # What is in the place of a URL may hold a password.
    value = "what is written" if "@" in repr(spec) else repr(spec)
    return f"{field}: {value} is wrong: {what[0].lower()}{what[1:]}{_choices(steps)}"


def _hint(steps: list[str]) -> Any:
    """The type at a path of keys in YAML's spelling."""
    hint: Any = PoolSpec
    for step in steps:
        if step.isdigit():
            continue  # a list's item: its type is in the list's
        [record] = _records(hint)
        hint = next(f.type for f in msgspec.structs.fields(record) if f.encode_name == step)
    return hint


def _records(hint: Any) -> list[type[Record]]:
    """Those in a type, however deep: X, X | None, tuple[X, ...], each with Metas or without."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return [hint]
    return [record for part in typing.get_args(hint) for record in _records(part)]


def _choices(steps: list[str]) -> str:
    hint = _hint(steps)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    literal = typing.get_origin(hint) is Literal
    return f"; write {' or '.join(typing.get_args(hint))}" if literal else ""

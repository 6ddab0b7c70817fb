"""The spec's `kvStore`: Redis servers that the pool owns, or external ones.

In: what a user wrote. Out: records from which the builders name the servers. The records check URLs
again, although the API server did: URLs end up on command lines, and a login must not.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, field

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.server_settings import INDEX_MEMORY
from baton_kvstore.errors import StoreMisconfigured
from baton_kvstore.settings import StoreSettings
from baton_operator.api.cel import CelRule, both, matches, ruled
from baton_operator.api.fields import PodTemplate
from baton_operator.api.record import Record
from baton_operator.api.resources import Quantity, Resources, check_quantity, quantity_bytes
from baton_operator.api.secrets import SecretRef
from baton_protocol.policies import Sharing

RedisUrl = Annotated[
    str,
    ruled(
        CelRule(
            # The record rejects a URL with a login: this rule's error would repeat the password.
            "self.contains('@') || "
            + matches(
                r"rediss?://([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
                r"(:[1-9][0-9]{0,4})?(/[0-9]{0,4})?"
            ),
            "not the URL of a Redis server; write redis://HOST[:PORT][/DB], or rediss://... "
            "for TLS, one per item",
        ),
        max_length=512,
    ),
]
_LOGIN = (
    "contains a login, which anyone who reads the pool would see; leave it out and write "
    "secretRef instead"
)


def _more_memory(field: str, values: str, words: str) -> CelRule:
    """A rule: a server's memory limit, if set, exceeds the memory for its values, given as CEL
    (`values`) and for people (`words`). Each value's own rule rejects invalid quantities."""
    limit = f"self.{field}.limits['memory']"
    return CelRule(
        f"!has(self.{field}) || !has(self.{field}.limits) || !('memory' in self.{field}.limits)"
        f" || !isQuantity(string({limit})) || !isQuantity({values})"
        f" || quantity(string({limit})).compareTo(quantity({values})) > 0",
        f"memory limit is not above the server's data limit; write more than {words}, or leave "
        "memory out",
        field=f".{field}",
    )


class ManagedStore(Record, frozen=True, kw_only=True):
    """Redis servers that belong to the pool: one index and `dataInstances` for KV bytes."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!isQuantity(string(self.memory))"
            " || quantity(string(self.memory)).compareTo(quantity('64Mi')) >= 0",
            "too small to hold KV; write at least 64Mi",
            field=".memory",
        ),
        _more_memory("indexResources", f"'{INDEX_MEMORY >> 20}Mi'", f"{INDEX_MEMORY >> 20}Mi"),
        _more_memory("dataResources", "string(self.memory)", "kvStore.managed.memory"),
    )

    memory: Annotated[
        Quantity, Meta(description="Memory for KV in each data instance; at least 64Mi.")
    ] = "1Gi"
    data_instances: Annotated[
        int, Meta(ge=1, le=64, description="Number of servers for KV bytes.")
    ] = 1
    index_resources: Annotated[
        Resources,
        Meta(
            description="Resources of the container `redis` of the index. Default: requests of"
            " half a CPU and 224Mi of memory, and ephemeral storage of 64Mi with a limit of 1Gi."
        ),
    ] = Resources()
    data_resources: Annotated[
        Resources,
        Meta(
            description="Resources of the container `redis` of each data instance. Default:"
            " requests of half a CPU and of 5/4 of `memory` plus 64Mi, and ephemeral storage of"
            " 64Mi with a limit of 1Gi."
        ),
    ] = Resources()
    pod_template: Annotated[PodTemplate, Meta(description="See prefill.podTemplate.")] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        check_quantity("memory", self.memory)

    @property
    def memory_bytes(self) -> int:
        return quantity_bytes(self.memory)

    @property
    def instances(self) -> tuple[str, ...]:
        """The names of the data servers, from "0"."""
        return tuple(str(number) for number in range(self.data_instances))


_DEFAULT = ManagedStore()


class ExternalStore(Record, frozen=True, kw_only=True):
    """Redis servers that do not belong to the pool."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule("!self.indexUrl.contains('@')", _LOGIN, field=".indexUrl"),
        CelRule("self.dataUrls.all(url, !url.contains('@'))", _LOGIN, field=".dataUrls"),
        CelRule(
            # Compares URLs without the database. The record also knows the default port.
            "self.dataUrls.all(url, url.find('//[^/]*') != self.indexUrl.find('//[^/]*'))",
            "dataUrls must not name the index's server, because eviction is set per server: "
            "data servers evict, the index must not; write another server",
            field=".dataUrls",
        ),
        CelRule(
            "self.dataUrls.all(url, self.dataUrls.exists_one(other, other == url))",
            "names an instance twice; write each once",
            field=".dataUrls",
        ),
        CelRule(
            "!has(self.caSecretRef) || self.indexUrl.startsWith('rediss://')"
            " || self.dataUrls.exists(url, url.startsWith('rediss://'))",
            "no URL uses TLS; write rediss://... URLs, or leave this out",
            field=".caSecretRef",
        ),
    )

    index_url: Annotated[
        RedisUrl,
        Meta(description="Server for markers, inboxes and the registry of nodes."),
    ]
    data_urls: Annotated[
        tuple[RedisUrl, ...],
        Meta(
            min_length=1,
            max_length=64,
            description="Servers for KV bytes. The order matters: append new ones at the end.",
        ),
    ]
    secret_ref: Annotated[
        SecretRef | None,
        Meta(
            description="Secret with the keys `username` (optional) and `password` of all servers."
        ),
    ] = None
    ca_secret_ref: Annotated[
        SecretRef | None,
        Meta(
            description="Secret whose key `ca.crt` holds the CA of the servers' certificates. Only"
            " for rediss://."
        ),
    ] = None

    def __post_init__(self) -> None:
        _check_url("indexUrl", self.index_url)
        for position, url in enumerate(self.data_urls):
            _check_url(f"dataUrls[{position}]", url)
        try:
            StoreSettings(index_url=self.index_url, data_urls=self.data_urls).check()
        except StoreMisconfigured as error:
            raise ValueError(f"dataUrls: {error}") from error


class KVStoreSpec(Record, frozen=True, kw_only=True):
    """Where nodes exchange KV. Default: servers that the pool owns."""

    rules: ClassVar[tuple[CelRule, ...]] = (both("managed", "external"),)

    sharing: Annotated[
        Sharing,
        Meta(
            description="Who may use the KV of a tenant's prompts. pool: all tenants. tenant:"
            " only that tenant."
        ),
    ] = "pool"
    managed: ManagedStore | None = None
    external: ExternalStore | None = None

    @property
    def owned(self) -> ManagedStore | None:
        """The servers that the pool owns; None if it uses external ones."""
        return None if self.external is not None else self.managed or _DEFAULT


def _check_url(name: str, url: str) -> None:
    wrong = (
        f"{name}: not the URL of a server that a pod can reach; write redis://HOST[:PORT][/DB], "
        "or rediss://... for TLS"
    )
    if "," in url:
        raise ValueError(wrong)
    try:
        endpoint = parse_endpoint(url)
    except StoreMisconfigured as error:
        raise ValueError(f"{name}: {error}") from error
    if endpoint.username or endpoint.password:
        raise ValueError(f"{name}: {endpoint.label} contains a login; write secretRef instead")
    if endpoint.kind == "unix" or endpoint.options:
        raise ValueError(wrong)

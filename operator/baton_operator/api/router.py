"""The spec's `router`: the routers, their Service, and the way to them from outside the cluster."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from baton_operator.api.cel import CelRule, both
from baton_operator.api.fields import (
    MOST_ROUTERS,
    Annotations,
    HostName,
    MaybeName,
    Name,
    PodTemplate,
)
from baton_operator.api.flags import RouterFlag
from baton_operator.api.record import Record
from baton_operator.api.resources import Resources
from baton_operator.api.schema_extras import KEY_DEFAULT, SET, keyed
from baton_operator.api.secrets import SecretFile
from baton_protocol.policies import Ranking

ServiceType = Literal["ClusterIP", "NodePort", "LoadBalancer"]
REQUEST_S = 600  # the router's default for --request-timeout, seconds
_REQUEST_FLAG = "--request-timeout="


class ServiceSpec(Record, frozen=True, kw_only=True):
    """The router's Service."""

    type: Annotated[
        ServiceType, Meta(description="Type of the Service: ClusterIP, NodePort or LoadBalancer.")
    ] = "ClusterIP"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port to which clients connect.")] = 8000
    annotations: Annotated[Annotations, Meta(description="Annotations of the Service.")] = field(
        default_factory=dict
    )


class IngressSpec(Record, frozen=True, kw_only=True):
    """An Ingress in front of the router."""

    host: Annotated[HostName, Meta(description="Host name that clients use.")]
    class_name: Annotated[
        MaybeName, Meta(description="IngressClass. Default: the cluster's default class.")
    ] = ""
    tls_secret_name: Annotated[
        MaybeName, Meta(description="Secret with the host's certificate. Empty: no TLS.")
    ] = ""
    annotations: Annotated[Annotations, Meta(description="Annotations of the Ingress.")] = field(
        default_factory=dict
    )


class ParentRef(Record, frozen=True, kw_only=True):
    """A reference to a Gateway."""

    name: Annotated[Name, Meta(description="Name of the Gateway.")]
    namespace: Annotated[
        MaybeName,
        Meta(
            description="Namespace of the Gateway. Default: the pool's.",
            extra_json_schema=KEY_DEFAULT,
        ),
    ] = ""
    section_name: Annotated[
        MaybeName,
        Meta(
            description="Listener of the Gateway. Default: all listeners.",
            extra_json_schema=KEY_DEFAULT,
        ),
    ] = ""


class HTTPRouteSpec(Record, frozen=True, kw_only=True):
    """A Gateway API HTTPRoute to the router."""

    parent_refs: Annotated[
        tuple[ParentRef, ...],
        Meta(
            min_length=1,
            max_length=32,
            description="Gateways to which the route attaches.",
            extra_json_schema=keyed("name", "namespace", "sectionName"),
        ),
    ]
    hostnames: Annotated[
        tuple[HostName, ...],
        Meta(
            max_length=16,
            description="Host names of the route. Empty: those of the Gateways.",
            extra_json_schema=SET,
        ),
    ] = ()


class RouterSpec(Record, frozen=True, kw_only=True):
    """The routers, which clients connect to."""

    rules: ClassVar[tuple[CelRule, ...]] = (both("ingress", "httpRoute"),)

    replicas: Annotated[int, Meta(ge=1, le=MOST_ROUTERS, description="Number of router pods.")] = 1
    placement: Annotated[
        Ranking,
        Meta(
            description="How a request's node is chosen. cost: the least predicted time. The"
            " other policies are for comparison. prefix: the node with the longest cached prefix"
            " of the prompt. least-request: the node with the fewest requests. round-robin: in"
            " turn. random: at random."
        ),
    ] = "cost"
    resources: Annotated[
        Resources,
        Meta(
            description="Resources of the container `router`. Default: requests of half a CPU"
            " and 512Mi of memory, and ephemeral storage of 64Mi with a limit of 1Gi."
        ),
    ] = Resources()
    pod_template: Annotated[PodTemplate, Meta(description="See prefill.podTemplate.")] = field(
        default_factory=dict
    )
    service: ServiceSpec = ServiceSpec()
    ingress: IngressSpec | None = None
    http_route: Annotated[
        HTTPRouteSpec | None,
        Meta(description="A Gateway API HTTPRoute to the router. Needs the Gateway API's CRDs."),
    ] = None
    api_keys_secret: Annotated[
        SecretFile | None,
        Meta(
            description="Secret key with lines of `TENANT KEY` or `TENANT sha256:HEX`. Default:"
            " clients need no API key."
        ),
    ] = None
    extra_args: Annotated[
        tuple[RouterFlag, ...],
        Meta(max_length=64, description="More flags of `baton router`, each as --NAME=VALUE."),
    ] = ()

    @property
    def request_s(self) -> int:
        """Time limit of a request in seconds, rounded up, from --request-timeout in `extra_args`:
        the spec has no field for it. As in the router, the last flag wins. With a value that is
        not a number no router starts, so any result will do."""
        given = [
            flag.removeprefix(_REQUEST_FLAG)
            for flag in self.extra_args
            if flag.startswith(_REQUEST_FLAG)
        ]
        try:
            seconds = float(given[-1]) if given else float(REQUEST_S)
        except ValueError:
            return REQUEST_S
        return math.ceil(seconds) if math.isfinite(seconds) and seconds > 0 else REQUEST_S

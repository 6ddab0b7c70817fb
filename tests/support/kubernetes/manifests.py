"""Sample pools for the operator's tests, and the kubelet's view of their manifests.

In: golden/*.pool.yaml. Out: resources, pools with fixed credentials, and each container's
environment and arguments as its process would see them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from baton_operator.api.pool import Credentials, Images, Installation, Pool, read_pool
from baton_operator.builders import Manifest

GOLDEN = Path(__file__).resolve().parents[2] / "operator" / "golden"
SAMPLES = sorted(path.name.removesuffix(".pool.yaml") for path in GOLDEN.glob("*.pool.yaml"))
# All samples fit the `restricted` policy but "host", which mounts a folder of the cluster's nodes.
RESTRICTED = [name for name in SAMPLES if name != "host"]
IMAGES = Images(
    node="registry.example/baton-node:0.1.0",
    router="registry.example/baton-router:0.1.0",
    redis="registry.example/redis:7.2.5",
    sim="registry.example/baton-sim:0.1.0",
)
INSTALLATION = Installation(images=IMAGES, namespace="baton-system")
CREDENTIALS = Credentials(
    redis_password="5ec1e7aa" * 8, link_token="70ce7bb0" * 8, tenant_secret="7e7a7700" * 8
)
# The Secrets of users that the samples refer to, by name.
USER_SECRETS = {
    "redis-login": {"username": "reader-writer", "password": "pass:word@with/signs"},
    "hub-login": {"token": "hf_of-nobody"},
    "tenants": {"keys.txt": "acme key-of-acme admin\n"},
}


def sample(name: str) -> dict[str, Any]:
    """The resource in golden/NAME.pool.yaml."""
    resource: dict[str, Any] = yaml.safe_load((GOLDEN / f"{name}.pool.yaml").read_text())
    return resource


def sample_pool(
    name: str,
    installation: Installation = INSTALLATION,
    credentials: Credentials = CREDENTIALS,
    **spec: Any,
) -> Pool:
    """The sample with top-level fields of its spec replaced."""
    resource = sample(name)
    resource["spec"] |= spec
    return read_pool(resource, installation, credentials)


def template_of(manifest: Manifest) -> Manifest | None:
    """The manifest's pod template, None if it has none."""
    template: Manifest | None = manifest.get("spec", {}).get("template")
    return template


def templates(manifests: Iterable[Manifest]) -> dict[str, Manifest]:
    """The pod templates by workload name."""
    found = ((one["metadata"]["name"], template_of(one)) for one in manifests)
    return {name: template for name, template in found if template is not None}


def containers(template: Manifest | None) -> Iterator[Manifest]:
    """Yield the init containers, then the others."""
    spec = template["spec"] if template else {}
    yield from spec.get("initContainers", ())
    yield from spec.get("containers", ())


def secret_values(manifests: Iterable[Manifest]) -> dict[str, dict[str, str]]:
    """The decoded values of the Secrets among the manifests, by name and key."""
    return {
        one["metadata"]["name"]: {
            key: base64.b64decode(text).decode() for key, text in one["data"].items()
        }
        for one in manifests
        if one["kind"] == "Secret"
    }


def environment(
    container: Manifest, fields: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """The container's variables; `fields` are the pod's fields by path. Raise KeyError where the
    kubelet would refuse to start the container."""
    variables = {}
    for item in container.get("env", ()):
        source = item.get("valueFrom", {})
        if "fieldRef" in source:
            variables[item["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            secret_key = source["secretKeyRef"]
            values = secrets.get(secret_key["name"], {}) if secret_key.get("optional") else None
            values = secrets[secret_key["name"]] if values is None else values
            if secret_key["key"] in values or not secret_key.get("optional"):
                variables[item["name"]] = values[secret_key["key"]]
        else:
            variables[item["name"]] = item["value"]
    return variables


def expanded(container: Manifest, variables: Mapping[str, str]) -> list[str]:
    """The arguments as the kubelet passes them: known $(NAME) replaced, $$ as a dollar."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([A-Za-z_]\w*)\)", value, argument) for argument in container["args"]]

"""Pools as the operator's tests use them, and what a kubelet would make of their manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from baton_operator.builders.child import Manifest
from baton_operator.pool import Images, Pool, read_pool

GOLDEN = Path(__file__).resolve().parents[1] / "operator" / "golden"
SAMPLES = sorted(path.name.removesuffix(".pool.yaml") for path in GOLDEN.glob("*.pool.yaml"))
IMAGES = Images(
    node="registry.example/baton-node:0.1.0",
    router="registry.example/baton-router:0.1.0",
    redis="registry.example/redis:7.2.5",
)


def sample(name: str) -> dict[str, Any]:
    """The resource in golden/NAME.pool.yaml."""
    resource: dict[str, Any] = yaml.safe_load((GOLDEN / f"{name}.pool.yaml").read_text())
    return resource


def sample_pool(name: str, images: Images = IMAGES, **spec: Any) -> Pool:
    """The sample with top-level fields of its spec replaced."""
    resource = sample(name)
    resource["spec"] |= spec
    return read_pool(resource, images)


def containers(manifest: Manifest) -> Iterator[Manifest]:
    template = manifest["spec"].get("template")
    yield from template["spec"]["containers"] if template else ()


def expanded(container: Manifest, variables: Mapping[str, str]) -> list[str]:
    """The arguments as the kubelet gives them: $(NAME) replaced where known, $$ a dollar."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([A-Za-z_]\w*)\)", value, word) for word in container["args"]]

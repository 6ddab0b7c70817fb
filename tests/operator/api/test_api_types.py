"""Manifests validate against the models of Kubernetes' own client, without an API server. The
models forbid unknown fields and require the mandatory ones."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from baton_operator.builders import build_pool
from tests.support.kubernetes.manifests import SAMPLES, sample_pool


def check(manifest: dict[str, Any]) -> None:
    models: Any = import_module("kubernetes.client.models")
    getattr(models, f"V1{manifest['kind']}").model_validate(manifest)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_manifest_is_valid_for_the_kubernetes_client(name: str) -> None:
    for manifest in build_pool(sample_pool(name)):
        if manifest["kind"] != "HTTPRoute":  # of the Gateway API, which the client does not have
            check(manifest)


@pytest.mark.parametrize("spec", [{"clusterIp": "None"}, {"ports": [{"name": "http"}]}])
def test_a_wrong_or_missing_field_is_found(spec: dict[str, Any]) -> None:
    [*_, service] = build_pool(sample_pool("sim"))
    with pytest.raises(ValueError, match=r"clusterIp|port"):
        check(service | {"spec": service["spec"] | spec})

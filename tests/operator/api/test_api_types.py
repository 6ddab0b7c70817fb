"""Without an API server: every field and type of a manifest is one that Kubernetes' own client
knows (its models forbid others), and everything that it requires is there."""

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
def test_the_api_knows_every_field_of_every_manifest(name: str) -> None:
    for manifest in build_pool(sample_pool(name)):
        if manifest["kind"] != "HTTPRoute":  # the Gateway API's, not Kubernetes' own
            check(manifest)


@pytest.mark.parametrize("spec", [{"clusterIp": "None"}, {"ports": [{"name": "http"}]}])
def test_a_wrong_or_missing_field_would_be_found(spec: dict[str, Any]) -> None:
    [*_, service] = build_pool(sample_pool("sim"))
    with pytest.raises(ValueError, match=r"clusterIp|port"):
        check(service | {"spec": service["spec"] | spec})

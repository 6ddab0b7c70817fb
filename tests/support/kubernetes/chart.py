"""Renders the chart with Helm.

In: a test's Kubernetes, and arguments for Helm. Out: manifests; the chart's values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.machine.client import Kubernetes

CHART = Path(__file__).resolve().parents[3] / "charts" / "baton"
OPERATOR = "baton-operator"
CRD = "inferencepools.baton.dev"
SCALERS = "poolscalers.baton.dev"
Manifest = dict[str, Any]
# Values for tests: a rule of topologySpreadConstraints, a peer of networkPolicy.monitoring.
SPREAD = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "baton-operator"}},
}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def values() -> Manifest:
    """The chart's default values."""
    defaults: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
    return defaults


def schema() -> Manifest:
    schema: Manifest = json.loads((CHART / "values.schema.json").read_text())
    return schema


def leaves(part: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of a schema's settable values: `operator.replicas`, ..."""
    for name, inner in part["properties"].items():
        if "properties" in inner:
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def set_words(changes: Mapping[str, Any]) -> list[str]:
    """Convert values by path to Helm's flags."""
    return [f"--set-json={path}={json.dumps(value)}" for path, value in changes.items()]


def render(kubernetes: Kubernetes, *arguments: str, namespace: str = "baton-system") -> str:
    """Render what `helm install baton` would create; raise CommandFailed if Helm fails."""
    return kubernetes.helm("template", "baton", str(CHART), f"--namespace={namespace}", *arguments)


def manifests(
    kubernetes: Kubernetes, *arguments: str, namespace: str = "baton-system"
) -> list[Manifest]:
    text = render(kubernetes, *arguments, namespace=namespace)
    return [one for one in yaml.safe_load_all(text) if one]


def one_of(manifests: list[Manifest], kind: str, name: str = OPERATOR) -> Manifest:
    [match] = [
        each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return match

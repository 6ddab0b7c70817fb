"""The CustomResourceDefinitions of InferencePools and PoolScalers, generated from the records of
spec and status.

In: those records. Out: manifests, and the chart's templates that hold them:

    python -m baton_operator.api.crd inferencepools > charts/baton/templates/crd-inferencepools.yaml
    python -m baton_operator.api.crd poolscalers > charts/baton/templates/crd-poolscalers.yaml

They are templates because Helm never upgrades the files in a chart's crds/. An uninstall of the
chart keeps them, because deleting a definition deletes all its objects.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from baton_operator.api.cel import CelRule, matches
from baton_operator.api.scaler import ScalerSpec, ScalerStatus
from baton_operator.api.schema import Schema, schema_of, validations
from baton_operator.api.spec import PoolSpec
from baton_operator.api.status import PoolStatus
from baton_operator.kube.kinds import POOL, POOL_SCALER
from baton_operator.names import API_VERSION, LONGEST_POOL_NAME, POOL_KIND, POOL_NAME, SCALER_KIND

GROUP, VERSION = API_VERSION.split("/")
PLURAL, SCALERS = POOL.plural, POOL_SCALER.plural
COLUMNS = {
    "Ready": '.status.conditions[?(@.type=="Ready")].status',
    "Reason": '.status.conditions[?(@.type=="Ready")].reason',
    "Updated": '.status.conditions[?(@.type=="Updated")].status',
    "Prefill": ".status.prefill.summary",
    "Decode": ".status.decode.summary",
    "Routers": ".status.router.summary",
    "Model": ".status.model.name",
    "Exact": ".status.exact",
    "URL": ".status.url",
    "Seen": ".status.operator.time",
}
DATES = {"Seen"}  # shown as an age
WIDE = {"Routers", "Exact", "Seen"}  # shown only by `kubectl get --output wide`
SCALER_COLUMNS = {"Desired": ".spec.replicas", "Current": ".status.replicas"}
_RULES = (
    # Not `required`: its error would not say what to write.
    CelRule(
        "has(self.spec)",
        "missing; write at least model.path, model.uri or engine.kind: sim",
        ".spec",
    ),
    CelRule(
        matches(POOL_NAME.pattern, "metadata.name")
        + f" && self.metadata.name.size() <= {LONGEST_POOL_NAME}",
        f"cannot start the names of Services; write at most {LONGEST_POOL_NAME} of a-z, 0-9 and "
        "'-', starting with a letter",
        ".metadata.name",
    ),
)


def crd() -> dict[str, Any]:
    """The definition of InferencePools."""
    resources: dict[str, Any] = {"status": {}}
    return _definition(POOL_KIND, PLURAL, "bpool", COLUMNS, "string", resources, _resource())


def scaler_crd() -> dict[str, Any]:
    """The definition of PoolScalers."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    resources: dict[str, Any] = {"status": {}, "scale": scale}
    return _definition(
        SCALER_KIND, SCALERS, "bscaler", SCALER_COLUMNS, "integer", resources, _scaler()
    )


def _definition(
    kind: str,
    plural: str,
    short: str,
    columns: dict[str, str],
    of_type: str,
    subresources: dict[str, Any],
    schema: Schema,
) -> dict[str, Any]:
    shown: list[dict[str, Any]] = [
        {"name": name, "type": "date" if name in DATES else of_type, "jsonPath": path}
        | ({"priority": 1} if name in WIDE else {})
        for name, path in columns.items()
    ]
    shown.append({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"})
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": shown,
        "schema": {"openAPIV3Schema": schema},
    }
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
        "shortNames": [short],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def helm_template(plural: str) -> str:
    """One manifest as a template of the chart."""
    text = yaml.safe_dump(DEFINITIONS[plural](), sort_keys=False, width=10_000)
    assert "{{" not in text, "Helm would read it as its own"
    head = (
        f"{{{{- /* Written by `python -m baton_operator.api.crd {plural}`; do not edit. */ -}}}}\n"
    )
    return f"{head}{{{{- if .Values.crds.install }}}}\n{text}{{{{- end }}}}\n"


def _resource() -> Schema:
    return {
        "type": "object",
        "description": "Prefill nodes, decode nodes, routers and a KV store that serve one model.",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": schema_of(PoolSpec, defaults=True),
            "status": schema_of(PoolStatus, defaults=False),
        },
        **validations(_RULES),
    }


def _scaler() -> Schema:
    return {
        "type": "object",
        "description": "The number of nodes of one role of an InferencePool, for autoscalers.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": schema_of(ScalerSpec, defaults=True),
            "status": schema_of(ScalerStatus, defaults=False),
        },
    }


DEFINITIONS = {PLURAL: crd, SCALERS: scaler_crd}

if __name__ == "__main__":
    sys.stdout.write(helm_template(sys.argv[1]))

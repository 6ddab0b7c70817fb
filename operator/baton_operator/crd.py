"""The CustomResourceDefinition of InferencePools, generated from the records of spec and status.

In: those records. Out: a manifest, and the chart's template that holds it:

    python -m baton_operator.crd > charts/baton/templates/crd-inferencepools.yaml

It is a template and not in the chart's crds/, since Helm never upgrades what lies there; and it is
kept when the chart is uninstalled, since with the definition all pools would go.
"""

from __future__ import annotations

from typing import Any

import yaml

from baton_operator.pool import API_VERSION, KIND, LONGEST_NAME, NAME
from baton_operator.schema import Schema, schema_of, validations
from baton_operator.spec.records import PoolSpec
from baton_operator.spec.rules import Rule, matches
from baton_operator.status.records import PoolStatus

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "inferencepools"
COLUMNS = {
    "Ready": '.status.conditions[?(@.type=="Ready")].status',
    "Reason": '.status.conditions[?(@.type=="Ready")].reason',
    "Prefill": ".status.prefill.summary",
    "Decode": ".status.decode.summary",
    "Model": ".status.model.name",
    "URL": ".status.url",
}
_RULES = (
    # Not `required`: that would not say what to write.
    Rule(
        "has(self.spec)",
        "missing; write at least model.path, model.uri or engine.kind: sim",
        ".spec",
    ),
    Rule(
        matches(NAME.pattern, "metadata.name") + f" && self.metadata.name.size() <= {LONGEST_NAME}",
        "cannot begin the names of services; write at most"
        f" {LONGEST_NAME} of a-z, 0-9 and '-', a letter first",
        ".metadata.name",
    ),
)


def crd() -> dict[str, Any]:
    """The manifest."""
    columns = [{"name": name, "type": "string", "jsonPath": path} for name, path in COLUMNS.items()]
    columns.append({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"})
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": _resource()},
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["bpool"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def helm_template() -> str:
    """The manifest as a file of the chart."""
    text = yaml.safe_dump(crd(), sort_keys=False, width=10_000)
    assert "{{" not in text, "Helm would read it as its own"
    head = "{{- /* Written by `python -m baton_operator.crd`; do not edit. */ -}}\n"
    return f"{head}{{{{- if .Values.crds.install }}}}\n{text}{{{{- end }}}}\n"


def _resource() -> Schema:
    status = schema_of(PoolStatus, defaults=False)
    status["properties"]["conditions"] |= {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    return {
        "type": "object",
        "description": "Prefill and decode nodes, a router and a KV store that serve one model.",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": schema_of(PoolSpec, defaults=True),
            "status": status,
        },
        **validations(_RULES),
    }


if __name__ == "__main__":
    print(helm_template(), end="")

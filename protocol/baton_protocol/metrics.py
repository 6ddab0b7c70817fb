"""Declares a record's field as a Prometheus metric, beside the field.

In: a record whose fields are annotated with MetricSpec. Out: name and help text of each metric, for
the pages of the nodes and of the router. Imports no Prometheus client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

import msgspec


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric's name and help text, as a node's page shows them. The name of a counter ends in
    `_total`, as Prometheus demands; every other metric is a gauge. Fields that differ only in
    `labels` are samples of one metric."""

    name: str
    help_text: str
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


def families_of(metrics: Mapping[str, MetricSpec]) -> dict[str, list[str]]:
    """Return the fields of each metric, by its name."""
    families: dict[str, list[str]] = {}
    for field, metric in metrics.items():
        families.setdefault(metric.name, []).append(field)
    return families


def metrics_of(record: type[msgspec.Struct]) -> dict[str, MetricSpec]:
    """Return the metrics of a record by field, in the order of the fields."""
    hints = get_type_hints(record, include_extras=True)
    return {
        field: annotation
        for field in record.__struct_fields__
        for annotation in get_args(hints[field])
        if isinstance(annotation, MetricSpec)
    }

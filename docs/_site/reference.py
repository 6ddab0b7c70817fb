"""Pages that are generated from the code: flags, fields of the resources, metrics; and the models.

    python docs/_site/reference.py      writes docs/reference/*.md and the models in quick-start.md

In: the options of `baton_cli`, the schemas of `baton_operator`, the metrics of router, nodes and
operator, the models of `baton_engine` and docs/reference/models.json. Out: `pages`, Markdown by
path.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from baton_cli.main import COMMANDS
from baton_cli.options.flag import Flag, flags_of
from baton_engine.config.families import BUILT_IN, find_family
from baton_node.server.gpu_usage import GpuUsage
from baton_node.server.metrics import NodeMetrics
from baton_operator.api.crd import crd, scaler_crd
from baton_operator.metrics import Metrics
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Load
from baton_protocol.metrics import metrics_of
from baton_protocol.store import NodeLoad, Speeds
from baton_protocol.vllm_metrics import CACHE_CONFIG, LOAD_ALIASES
from baton_router.metrics.admission_metrics import AdmissionMetrics
from baton_router.metrics.batch_metrics import BatchMetrics
from baton_router.metrics.demand import DemandCounter
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.metrics.vllm_names import ROUTER_ALIASES, TOKENS
from baton_router.nodes.model_grammars import GrammarCounts
from baton_router.nodes.pool_view import PoolView

QUICK_START = Path(__file__).resolve().parents[1] / "quick-start.md"
REFERENCE = Path(__file__).resolve().parents[1] / "reference"
WRITTEN = "Written by `python docs/_site/reference.py`; do not edit."
FLAGS_HEAD = f"""# Flags

{WRITTEN} Every flag except a command's arguments also has an environment variable; see
[flags and variables](../operations/run.md#flags-and-variables).
"""
FIELDS_HEAD = f"""# Fields of the resources

{WRITTEN} `kubectl explain bpool.spec --recursive` shows the same for the installed version.
`[]` marks the items of a list.
"""

METRICS_HEAD = f"""# Metrics

{WRITTEN}

[Observe](../operations/observe.md#metrics) says which metrics to watch, and
[Kubernetes](../kubernetes.md#metrics) how to scrape them. A histogram has the series `_bucket`,
`_sum` and `_count`.
"""
ROUTERS = """On `/metrics` of a router, which also has the nodes' counters and gauges below, without
speeds and data servers."""
NODES = """On `/metrics` of a node. `instance` counts the data servers from 0, in the order of
`--redis-data`."""
VLLM_NAMES = """On `/metrics?names=vllm` of routers and nodes, with vLLM's labels `model_name` and
`engine`. `engine` is the node's name, or `router` for what a router counts itself. A router's page
has the figures of all its nodes."""
OPERATORS = "On `/metrics` of the operator, port 8081."
MODELS_TEXT = """
A "yes" is the result of a test: [models.json](reference/models.json) names the tests and their
checkpoints, and `make models` runs them again. An empty cell is one that no test has shown. What
the tests have shown:

"""
WITHOUT_FAMILY = "by transformers' code", "as in transformers"
BEGIN, END = "<!-- begin of the models -->\n", "<!-- end of the models -->\n"


def pages() -> dict[Path, str]:
    """Every generated page."""
    return {
        REFERENCE / "flags.md": _flags(),
        REFERENCE / "fields.md": _fields(),
        REFERENCE / "metrics.md": asyncio.run(_metrics()),
        QUICK_START: _with_models(QUICK_START.read_text()),
    }


def _with_models(page: str) -> str:
    """The page with the table of models between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{_models()}{END}{after}"


def _models() -> str:
    """The families, and what tests have shown of each: see tests/support/project/model_record.py"""
    record = json.loads((REFERENCE / "models.json").read_text())
    shown, columns = record["models"], record["columns"]
    rows = [["`architectures` in config.json", "such as", "sliding windows", *columns]]
    for name in [*sorted(BUILT_IN), *sorted(shown.keys() - BUILT_IN.keys())]:
        family = find_family(name)
        facts = (family.examples, family.windows) if family else WITHOUT_FAMILY
        cells = ("yes" if column in shown.get(name, {}) else "" for column in columns)
        rows.append([f"`{name}`", *facts, *cells])
    head, *rest = [f"| {' | '.join(row)} |\n" for row in rows]
    legend = [f"- {column}: {meaning}.\n" for column, meaning in columns.items()]
    return "".join([head, f"|{'---|' * len(rows[0])}\n", *rest, MODELS_TEXT, *legend])


async def _metrics() -> str:
    """In an event loop, whose tasks one of the metrics counts."""
    load = Load(Epoch("epoch"), "ready", Speeds(), NodeLoad())
    metrics = NodeMetrics(NodeId("node"), lambda: load, lambda: GpuUsage(0.0, 0, 0))
    node = _families(metrics.registry)
    own = [one for one in _families(_router_registry()) if one[0] not in {each[0] for each in node}]
    parts = [METRICS_HEAD]
    for title, where, families in (
        ("Routers", ROUTERS, own),
        ("Nodes", NODES, node),
        ("Operator", OPERATORS, _families(Metrics().registry)),
    ):
        head = "| metric | type | labels | meaning |\n|---|---|---|---|"
        rows = "\n".join(
            f"| `{name}` | {kind} | {', '.join(map(_code, labels))} | {_cell(meaning)} |"
            for name, kind, labels, meaning in sorted(families)
        )
        parts.append(f"## {title}\n\n{where}\n\n{head}\n{rows}\n")
    return "\n".join([*parts, _vllm_names()])


def _vllm_names() -> str:
    fields = metrics_of(NodeLoad)
    rows = [(name, "router", f"`{source}`") for name, source in ROUTER_ALIASES.items()]
    rows += [(name, "router", _cell(about)) for name, (about, _) in TOKENS.items()]
    rows.append((CACHE_CONFIG, "both", "1; labels `block_size` and `num_gpu_blocks`"))
    for name, alias in LOAD_ALIASES.items():
        plus = " + ".join(f"`{fields[field].name}`" for field in alias.plus)
        minus = "".join(f" - `{fields[field].name}`" for field in alias.minus)
        share = f"({plus}{minus}) / `{fields[alias.of].name}`" if alias.of else plus + minus
        rows.append((name, "nodes" if name in TOKENS else "both", share))
    body = "\n".join(f"| `{name}` | {where} | {source} |" for name, where, source in sorted(rows))
    head = "| metric | on pages of | Baton's metrics |\n|---|---|---|"
    return f"## vLLM's names\n\n{VLLM_NAMES}\n\n{head}\n{body}\n"


def _router_registry() -> CollectorRegistry:
    """The registry of a router that has met no node."""
    metrics = RouterMetrics(PoolView(time.monotonic, 1), DemandCounter("router", time.monotonic))
    metrics.count_refused_input(lambda: 0, dict)
    metrics.grammars(GrammarCounts)
    AdmissionMetrics(metrics.registry)
    BatchMetrics(metrics.registry)
    return metrics.registry


def _families(registry: CollectorRegistry) -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and description of each of Baton's own metrics."""
    found = []
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith("baton_"):
                labels = getattr(collector, "_labelnames", getattr(family, "_labelnames", ()))
                found.append((_full_name(family), family.type, tuple(labels), family.documentation))
    return found


def _full_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _flags() -> str:
    parts = [FLAGS_HEAD]
    for command in COMMANDS:
        parts.append(f"## baton {command.words}\n")
        shown = [flag for flag in flags_of(command.options) if not flag.hidden]
        for title, group in groupby(shown, key=lambda flag: flag.title):
            rows = "\n".join(_flag_row(flag) for flag in group)
            head = "| flag | default | meaning |\n|---|---|---|"
            parts.append(f"**{title}**\n\n{head}\n{rows}\n" if title else f"{head}\n{rows}\n")
    return "\n".join(parts)


def _flag_row(flag: Flag) -> str:
    default = "" if flag.default is None else flag.show(flag.default)
    return f"| `{flag.option}` | {_code(default)} | {_cell(flag.help)} |"


def _fields() -> str:
    parts = [FIELDS_HEAD]
    for definition in (crd(), scaler_crd()):
        [version] = definition["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        parts.append(f"## {definition['spec']['names']['kind']}\n")
        parts.append("| field of `spec` | type | default | meaning |\n|---|---|---|---|")
        parts += [_field_row(path, field) for path, field in _walk("", schema)]
        parts.append("")
    return "\n".join(parts)


def _walk(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below, field
        yield from _walk(below, field)
        yield from _walk(f"{below}[]", field.get("items", {}))


def _field_row(path: str, field: Mapping[str, Any]) -> str:
    kind = "integer or string" if field.get("x-kubernetes-int-or-string") else field.get("type", "")
    if "enum" in field:
        kind = ", ".join(f"`{value}`" for value in field["enum"])
    bounds = [
        f"{words} {field[key]}"
        for key, words in (("minimum", "at least"), ("maximum", "at most"))
        if key in field
    ]
    if bounds:
        kind = f"{kind}, {' and '.join(bounds)}"
    default = field.get("default")
    shown = "" if isinstance(default, dict | list) or default is None else str(default)
    if isinstance(default, bool):
        shown = str(default).lower()
    return f"| `{path}` | {kind} | {_code(shown)} | {_cell(field.get('description', ''))} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    """One line, in which neither a bar nor an angle bracket means anything."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    for page, text in pages().items():
        page.write_text(text)

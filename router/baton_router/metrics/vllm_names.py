"""The router's figures and those of its nodes under vLLM's names, as far as vLLM has them.

In: the router's own metrics, the pool view, and the names of the models. Out: a page with vLLM's
labels `model_name` and `engine`, which is a node's id, or ROUTER for what the router counts itself;
and the load of the whole pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_protocol.vllm_metrics import (
    CACHE_CONFIG,
    CACHE_CONFIG_HELP,
    CACHE_CONFIG_LABELS,
    KV_USAGE,
    LOAD_ALIASES,
    WAITING,
    LoadAlias,
)
from baton_router.metrics.demand import DemandCounter
from baton_router.nodes.node_view import NodeView
from baton_router.nodes.pool_view import PoolView

ROUTER = "router"
LABELS = ("model_name", "engine")
# vLLM's names of the router's own metrics.
ROUTER_ALIASES: Mapping[str, str] = {
    "vllm:time_to_first_token_seconds": "baton_router_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "baton_router_inter_token_latency_seconds",
    # Its name before vLLM 0.11.
    "vllm:time_per_output_token_seconds": "baton_router_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "baton_router_e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "baton_router_queue_seconds",
    "vllm:request_success_total": "baton_router_finished_total",
}
# Counted as the clients of this router see them: nodes count a prompt once per node, and their
# counters go with them.
TOKENS: Mapping[str, tuple[str, str]] = {
    "vllm:prompt_tokens_total": ("Tokens of accepted prompts.", "prompt_tokens_total"),
    "vllm:generation_tokens_total": ("Tokens sent to clients.", "output_tokens_total"),
}


class VllmNames(Collector):
    """`names` returns the names of the served models; `held` counts requests that wait in the
    router."""

    def __init__(
        self,
        view: PoolView,
        demand: DemandCounter,
        own: CollectorRegistry,
        *,
        names: Callable[[], Sequence[str]],
        held: Callable[[], int],
    ) -> None:
        self._view = view
        self._demand = demand
        self._own = own
        self._names = names
        self._held = held
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is known at registration

    def load(self) -> dict[str, float]:
        """The load of the whole pool, by vLLM's names without their prefix."""
        loads = [node.report.load for node in self._view.ready()]
        values = {name: LOAD_ALIASES[name].value(loads) for name in (KV_USAGE, WAITING)}
        values[WAITING] += self._held()
        return {name.removeprefix("vllm:"): value for name, value in values.items()}

    def collect(self) -> Iterator[Metric]:
        names = self._names()
        own = {"model_name": names[0] if names else "", "engine": ROUTER}
        families = {family.name: family for family in self._own.collect()}
        for name, source in ROUTER_ALIASES.items():
            yield _renamed(families[source.removesuffix("_total")], name, own)
        report = self._demand.report(0, 0)
        for name, (help_text, field) in TOKENS.items():
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            counter.add_metric(tuple(own.values()), float(getattr(report, field)))
            yield counter
        for name, alias in LOAD_ALIASES.items():
            if name not in TOKENS:
                family = self._of_nodes(name, alias, names)
                if name == WAITING:
                    family.add_metric(tuple(own.values()), float(self._held()))
                yield family
        caches = GaugeMetricFamily(CACHE_CONFIG, CACHE_CONFIG_HELP, labels=CACHE_CONFIG_LABELS)
        for node in self._view.nodes.values():
            blocks = (str(node.report.layout.block_size), str(node.report.load.total_blocks))
            caches.add_metric((*_labels(node, names), *blocks), 1.0)
        yield caches

    def _of_nodes(
        self, name: str, alias: LoadAlias, names: Sequence[str]
    ) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = kind(name, alias.help_text, labels=LABELS)
        for node in self._view.nodes.values():
            family.add_metric(_labels(node, names), alias.value([node.report.load]))
        return family


def _labels(node: NodeView, names: Sequence[str]) -> tuple[str, str]:
    """Values of LABELS. `names` are those of the served models."""
    model = node.report.model
    return (model if model in names or not names else names[0]), node.report.node


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """The family under another name, with more labels."""
    renamed = Metric(name.removesuffix("_total"), family.documentation, family.type)
    for sample in family.samples:
        end = sample.name.removeprefix(family.name)
        if end != "_created":  # when Python made the object
            renamed.add_sample(renamed.name + end, {**labels, **sample.labels}, sample.value)
    return renamed

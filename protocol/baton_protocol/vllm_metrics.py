"""vLLM's names of a node's figures, for dashboards and load balancers that know vLLM.

In: loads of nodes. Out: the values that the pages of nodes and routers show with `?names=vllm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from baton_protocol.store import NodeLoad

MetricNames = Literal["baton", "vllm"]
METRIC_NAMES: tuple[MetricNames, ...] = get_args(MetricNames)
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
# Its value is 1; load balancers that know prefixes read its labels.
CACHE_CONFIG = "vllm:cache_config_info"
CACHE_CONFIG_HELP = "The KV cache: tokens of a block, and number of blocks."
CACHE_CONFIG_LABELS = ("model_name", "engine", "block_size", "num_gpu_blocks")


@dataclass(frozen=True, slots=True)
class LoadAlias:
    """One of vLLM's metrics: the sum of the fields `plus` of NodeLoad, less those of `minus`; if
    `of` is given, as a share of that field."""

    help_text: str
    plus: tuple[str, ...]
    minus: tuple[str, ...] = ()
    of: str = ""

    def value(self, loads: Iterable[NodeLoad]) -> float:
        """The value for these nodes together."""
        total, whole = 0.0, 0.0
        for load in loads:
            total += sum(getattr(load, name) for name in self.plus)
            total -= sum(getattr(load, name) for name in self.minus)
            whole += getattr(load, self.of) if self.of else 0.0
        if self.of:
            return total / whole if whole else 0.0
        return total


_KV_USAGE = LoadAlias(
    "KV blocks in use, as a share of all; 1 is full. Blocks that are only cached are free.",
    plus=("total_blocks",),
    minus=("free_blocks",),
    of="total_blocks",
)
LOAD_ALIASES: Mapping[str, LoadAlias] = {
    RUNNING: LoadAlias("Sequences in the running batch.", ("running",)),
    WAITING: LoadAlias("Sequences that wait to be scheduled or for KV.", ("waiting", "parked")),
    KV_USAGE: _KV_USAGE,
    "vllm:gpu_cache_usage_perc": _KV_USAGE,  # its name before vLLM 0.10
    "vllm:num_preemptions_total": LoadAlias(
        "Sequences that lost their blocks to others.", ("preemptions_total",)
    ),
    "vllm:prompt_tokens_total": LoadAlias(
        "Prompt tokens, from every source.", ("prompt_tokens_total",)
    ),
    "vllm:generation_tokens_total": LoadAlias("Tokens sampled.", ("generated_tokens_total",)),
    "vllm:prompt_tokens_cached_total": LoadAlias(
        "Prompt tokens that were not computed.",
        ("cached_prompt_tokens_total", "host_prompt_tokens_total", "fetched_prompt_tokens_total"),
    ),
    "vllm:prefix_cache_queries_total": LoadAlias(
        "Prompt tokens looked up in the node's cache.", ("prompt_tokens_total",)
    ),
    "vllm:prefix_cache_hits_total": LoadAlias(
        "Prompt tokens found in the node's cache.", ("cached_prompt_tokens_total",)
    ),
    "vllm:external_prefix_cache_queries_total": LoadAlias(
        "Prompt tokens that the node's cache did not have.",
        ("prompt_tokens_total",),
        minus=("cached_prompt_tokens_total",),
    ),
    "vllm:external_prefix_cache_hits_total": LoadAlias(
        "Prompt tokens from the host tier and the store.",
        ("host_prompt_tokens_total", "fetched_prompt_tokens_total"),
    ),
    "vllm:spec_decode_num_drafts_total": LoadAlias(
        "Sequences of steps that had drafts.", ("drafted_rows_total",)
    ),
    "vllm:spec_decode_num_draft_tokens_total": LoadAlias(
        "Drafts of next tokens that steps computed.", ("drafted_tokens_total",)
    ),
    "vllm:spec_decode_num_accepted_tokens_total": LoadAlias(
        "Drafts that were the next tokens.", ("accepted_drafts_total",)
    ),
}


def metric_names(given: Iterable[str]) -> MetricNames:
    """The names that a page shows, from the values of its query parameter `names`. Raise ValueError
    with the problem."""
    values = list(given)
    if not values:
        return "baton"
    for known in METRIC_NAMES:
        if values == [known]:
            return known
    shown = values[0] if len(values) == 1 else values
    raise ValueError(f"names is {shown!r}; use {' or '.join(METRIC_NAMES)}")

"""How settings become an engine, and the self-benchmark, which leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any

import pytest

from baton_engine.config.engine_config import EngineConfig, SimConfig
from baton_engine.interface import Launched, Row, Runner
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.engine.build_engine import build_engine, torch_settings
from baton_node.engine.measure_speeds import measure_compute, measure_transfers
from baton_node.errors import SetupError
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch
from tests.support.stores.kvstore import PATIENCE_S, plain_client


def settings(**fields: object) -> NodeSettings:
    return NodeSettings(node="n", role="decode", engine="sim", **fields)  # type: ignore[arg-type]


def test_the_simulated_engine_takes_its_geometry_from_the_settings() -> None:
    options = SimConfig(layers=3, kv_heads=1, head_dim=8, prefill_ms_per_token=0.5)
    info = build_engine(settings(sim=options, kv_blocks=77, chunk_blocks=2, block_size=8)).info
    assert (info.layout.num_layers, info.layout.chunk_tokens, info.num_blocks) == (3, 16, 77)


def test_memory_in_bytes_becomes_blocks() -> None:
    info = build_engine(settings(kv_memory=1 << 20)).info
    assert info.num_blocks == (1 << 20) // info.layout.block_bytes


def test_host_memory_in_bytes_becomes_blocks_of_the_host_tier() -> None:
    engine = build_engine(settings(host_kv_memory=1 << 20))
    assert engine.load().host_total_blocks == (1 << 20) // engine.info.layout.block_bytes
    assert build_engine(settings()).load().host_total_blocks == 0


@pytest.mark.parametrize(("overlap", "overlaps"), [("auto", False), ("on", True), ("off", False)])
def test_the_simulated_engine_overlaps_steps_as_set(overlap: str, overlaps: bool) -> None:
    assert build_engine(settings(overlap=overlap)).overlap is overlaps


def test_the_torch_engine_gets_every_engine_setting_of_the_node() -> None:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "matmul_precision": "high",
        "quantization": "int8",
        "kv_cache_dtype": "fp8",
        "device": "cuda:1",
        "gpu_memory_utilization": 0.5,
        "kv_blocks": 5,
        "host_kv_memory": 6,
        "block_size": 7,
        "chunk_blocks": 8,
        "kv_shards": 9,
        "store_codec": "int8",
        "max_batched_tokens": 10,
        "max_num_seqs": 11,
        "max_model_len": 12,
        "threads": 13,
        "kernels": "torch",
        "enforce_eager": True,
        "overlap": "off",
        "batch_invariant": "on",
        "speculative_config": '{"method": "suffix"}',
        "overcommit": True,
        "log_steps": "json",
        "runner": "pooling",
        "verify_weights": True,
        "model_impl": "baton",
        "performance_mode": "throughput",
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 14,
        "max_num_partial_prefills": 15,
        "max_long_partial_prefills": 16,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "max_pinned_fraction": 0.5,
        "scheduler_cls": "package:Class",
        "max_logprobs": 14,
        "logits_processors": "package.module:Class",
        "logprobs_mode": "raw_logits",
    }
    config = torch_settings(NodeSettings(node="n", role="decode", model="/m", **options))
    assert {name: getattr(config, name) for name in options} == options
    assert {field.name for field in fields(EngineConfig)} - set(options) == {"kv_memory"}


@pytest.mark.parametrize(
    "bad", [{"kv_blocks": 0}, {"chunk_blocks": 0}, {"block_size": -1}, {"host_kv_memory": 9}]
)
def test_an_impossible_setting_is_an_error_of_one_line_with_its_value(bad: dict[str, int]) -> None:
    with pytest.raises(SetupError, match=str(next(iter(bad.values())))) as raised:
        build_engine(settings(**bad))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("blocks", [1, 2, 3, 2048])
def test_the_self_benchmark_measures_and_leaves_no_trace(blocks: int) -> None:
    engine = build_engine(settings(kv_blocks=blocks))
    before = engine.load()
    speeds = measure_compute(engine.info, engine.runner)
    assert speeds.prefill_tokens_per_s > 0
    assert speeds.decode_step_ms > 0
    assert engine.load() == before
    assert engine.cached_chunks() == ()
    engine.check_integrity()


class CountedRunner:
    """Wraps a runner and records the tokens of each step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.memory = runner.memory
        self.tokens: list[int] = []

    def launch(self, rows: Sequence[Row]) -> Launched:
        self.tokens.append(sum(len(row.tokens) for row in rows))
        return self._runner.launch(rows)


@pytest.mark.parametrize(
    ("gpu", "sizes", "first", "prompt"),
    [
        (False, {}, 8, 64),
        (True, {"max_batched_tokens": 8192}, 2048, 2048),
        (True, {"max_batched_tokens": 512}, 512, 512),
        (True, {"max_batched_tokens": 8192, "kv_blocks": 10}, 156, 156),
    ],
)
def test_a_gpu_is_measured_with_a_long_prompt_that_it_has_computed_before(
    gpu: bool, sizes: dict[str, int], first: int, prompt: int
) -> None:
    """A step of 64 tokens takes a GPU as long as its launches."""
    engine = build_engine(settings(**sizes))
    runner = CountedRunner(engine.runner)
    measure_compute(engine.info, runner, gpu=gpu)
    assert runner.tokens[:2] == [first, prompt]
    assert runner.tokens[2:] == [1] * len(runner.tokens[2:])
    assert 1 <= len(runner.tokens[2:]) <= 4


def test_the_number_of_head_shards_is_part_of_the_fingerprint() -> None:
    one, two = (build_engine(settings(kv_shards=shards)).info for shards in (1, 2))
    assert (one.layout.kv_shards, two.layout.kv_shards) == (1, 2)
    assert one.fingerprint != two.fingerprint


def test_head_shards_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(SetupError, match="3"):
        build_engine(settings(kv_shards=3))


@pytest.mark.integration
@pytest.mark.parametrize("shards", [1, 2])
def test_the_measured_transfer_leaves_no_chunk_in_the_store(
    store: EmbeddedStore, shards: int
) -> None:
    info = build_engine(settings(kv_shards=shards)).info
    plane = DataPlane(store.data_urls, info.layout, info.fingerprint, Epoch("e"))
    plane.start()
    with closing(plane):
        put, get, latency_ms = measure_transfers(
            plane, store.data_urls, info.fingerprint, info.layout, budget_s=PATIENCE_S
        )
        assert all(each.get_bytes_per_s > 0 for each in plane.instances())
    assert min(put, get, latency_ms) > 0
    for url in store.data_urls:
        with plain_client(url) as client:
            assert client.dbsize() == 0


@pytest.mark.integration
def test_measured_speeds_are_0_if_the_store_is_unreachable() -> None:
    info = build_engine(settings()).info
    urls = ("unix:///nowhere/data0.sock",)
    plane = DataPlane(urls, info.layout, info.fingerprint, Epoch("e"))
    plane.start()
    with closing(plane):
        assert measure_transfers(plane, urls, info.fingerprint, info.layout) == (0.0, 0.0, 0.0)

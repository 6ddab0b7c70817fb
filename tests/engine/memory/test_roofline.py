"""The bytes that a decode step reads: those of its products' weights, of the experts that it
chooses, and of the KV that its windows see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton_engine.config.experts import ExpertsConfig
from baton_engine.memory.estimate import count_weights
from baton_engine.memory.roofline import DecodeRoofline, Machine, kv_read
from baton_engine.runner import machine_speeds
from baton_protocol.layout import KVGroup
from tests.support.engines.demands import config_of, kv_layout

LAYOUT = kv_layout()
EMBEDDING = 151936 * 4096


def test_an_embedding_is_read_only_as_the_head_that_is_tied_to_it() -> None:
    for tied in (False, True):
        config = config_of(tied=tied)
        model = DecodeRoofline.of(config, LAYOUT, 2)
        products = count_weights(config) - (0 if tied else EMBEDDING)
        assert (model.weights, model.weight_bytes) == (products, 2 * products)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    experts = ExpertsConfig(
        num_experts=8,
        top_k=2,
        size=100,
        layers=(True,) * 36,
        scoring="softmax",
        renormalize=True,
    )
    config = replace(config_of(), experts=experts)
    model = DecodeRoofline.of(config, LAYOUT, 2)
    each = 36 * 3 * 4096 * 100  # the weights of one expert of each layer
    assert model.experts.weights == 8 * each
    assert model.weight_bytes - model.weights_read(1) == 2 * 6 * each
    assert model.weights_read(1) < model.weights_read(8) < model.weight_bytes
    assert model.operations(3) == 3 * 2 * (model.weights - 6 * each)


def test_layers_with_a_window_read_no_more_than_it() -> None:
    layout = kv_layout(layers=3, groups=(KVGroup((0,)), KVGroup((1, 2), window=10)))
    per_layer = layout.layer_bytes() // layout.block_size
    assert kv_read(layout, [8]) == 8 * 3 * per_layer
    assert kv_read(layout, [100]) == (100 + 2 * 10) * per_layer
    assert kv_read(layout, [8, 100]) == (108 + 2 * (8 + 10)) * per_layer


def test_a_machine_reads_and_multiplies_at_a_positive_speed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_speeds, "READ_BYTES", 1 << 16)
        patch.setattr(machine_speeds, "SIDE", {"cpu": 16})
        found = machine_speeds.measure_machine(torch.device("cpu"), torch.float32)
    assert isinstance(found, Machine)
    assert found.bytes_per_s > 0
    assert found.operations_per_s is not None
    assert found.operations_per_s > 0

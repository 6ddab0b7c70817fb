"""The groups of layers that an engine makes from a model's windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.model_config import AttentionSpec, BridgeConfig, ModelConfig
from baton_engine.errors import SettingsError
from baton_engine.memory.requirements import PADDED_SHARE, groups_of, layout_of
from baton_protocol.layout import keys_and_values
from tests.support.engines.demands import config_of

Windows = list[int | None]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([], []),
        ([None] * 3, []),
        ([512] * 3, [((0, 1, 2), 512)]),
        ([512, None] * 2, [((1, 3), None), ((0, 2), 512)]),
        ([None] * 2 + [512] * 4, [((0, 1), None), ((2, 3), 512), ((4, 5), 512)]),
        ([64, 512, None], [((2,), None), ((0,), 64), ((1,), 512)]),
    ],
)
def test_layers_of_equal_window_share_blocks_and_groups_without_a_window_come_first(
    windows: Windows, expected: list[tuple[tuple[int, ...], int | None]]
) -> None:
    config = replace(config_of(num_layers=len(windows) or 4), windows=tuple(windows))
    assert [(group.layers, group.window) for group in groups_of(config, "float32")] == expected


@pytest.mark.parametrize(
    ("full", "windowed", "sizes"),
    [
        (4, 22, [4, 4, 4, 4, 4, 4, 2]),
        (13, 14, [13, 14]),
        (1, 27, [1] + [3] * 9),
    ],
)
def test_larger_sets_of_layers_are_split_so_that_little_of_the_blocks_is_unused(
    full: int, windowed: int, sizes: list[int]
) -> None:
    layers = full + windowed
    windows = (None,) * full + (512,) * windowed
    groups = groups_of(replace(config_of(num_layers=layers), windows=windows), "float32")
    assert sorted(layer for group in groups for layer in group.layers) == list(range(layers))
    assert [len(group.layers) for group in groups] == sizes
    slots = len(groups) * max(sizes)
    assert slots - layers <= PADDED_SHARE * slots


def test_a_layout_has_the_groups_and_counts_all_of_them_in_a_chunk() -> None:
    settings = TorchSettings(model=Path("model"))
    plain = layout_of(settings, config_of(num_layers=4))
    mixed = layout_of(settings, replace(config_of(num_layers=4), windows=(512, None, 512, None)))
    assert plain.groups == ()
    assert [group.layers for group in mixed.groups] == [(1, 3), (0, 2)]
    assert mixed.block_bytes * 2 == plain.block_bytes
    assert (mixed.token_bytes, mixed.chunk_blocks) == (plain.token_bytes, plain.chunk_blocks)


def heads_config(heads: Sequence[tuple[int, int]], windows: Windows | None = None) -> ModelConfig:
    """A config whose layers have these numbers of KV heads and head sizes."""
    layers = tuple(
        AttentionSpec(num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=size, scale=1.0)
        for kv_heads, size in heads
    )
    bridge = BridgeConfig(version="", values="", backbone="", weights=0, layers=layers)
    return replace(config_of(num_layers=len(heads)), bridge=bridge, windows=tuple(windows or ()))


@pytest.mark.parametrize(
    ("heads", "windows", "expected"),
    [
        ([(2, 8), (1, 16), (2, 8), (1, 16)], None, [(0, 2), (1, 3)]),
        ([(3, 8)] * 2 + [(1, 8)] * 12, None, [(0, 1), tuple(range(2, 8)), tuple(range(8, 14))]),
        # One layer without a window has as many bytes as two with it.
        ([(2, 8), (2, 8), (1, 32)], [64, 64, None], [(2,), (0, 1)]),
        # The blocks of layer 2 are less full.
        ([(2, 16), (2, 16), (1, 24)], [64, 64, None], [(2,), (0,), (1,)]),
    ],
)
def test_layers_with_equal_fields_share_blocks_of_about_equal_bytes(
    heads: list[tuple[int, int]],
    windows: Windows | None,
    expected: list[tuple[int, ...]],
) -> None:
    layout = layout_of(TorchSettings(model=Path("model")), heads_config(heads, windows))
    assert [group.layers for group in layout.groups] == expected
    for layer, (kv_heads, size) in enumerate(heads):
        group, _ = layout.layer_places[layer]
        assert layout.group_fields[group] == keys_and_values(kv_heads, size, layout.dtype)
    used = sum(layout.layer_bytes(group) for group, _ in layout.layer_places)
    assert used >= (1 - PADDED_SHARE) * layout.num_groups * layout.block_bytes
    shared = [group for group in layout.groups if not group.fields]
    assert shared, "the first layer's fields are those of the layout"


def test_head_shards_must_divide_the_heads_of_each_layer() -> None:
    settings = TorchSettings(model=Path("model"), kv_shards=2)
    config = heads_config([(4, 8), (1, 16)])
    with pytest.raises(SettingsError, match="--kv-shards 2 does not divide the model's 1 KV head"):
        layout_of(settings, config)

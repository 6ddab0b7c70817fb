"""The groups of layers that an engine makes from a model's windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton_engine.config.engine_config import TorchSettings
from baton_engine.memory.requirements import PADDED_SHARE, groups_of, layout_of
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

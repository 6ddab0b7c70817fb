"""Engines that share GPUs."""

from __future__ import annotations

import pytest

from baton.errors import CommandError
from baton.gpus import CONTEXT_BYTES, USED_SHARE, Gpu, Share, parse_gpus, share_gpus

GIB = 1 << 30
LISTING = "0, GPU-aa, 80000\n1, GPU-bb, 40000\n"


def test_every_gpu_counts_where_nothing_else_is_said() -> None:
    assert parse_gpus(LISTING, None) == [Gpu("0", 80000 << 20), Gpu("1", 40000 << 20)]


@pytest.mark.parametrize(
    ("visible", "names"), [("1", ["1"]), ("1,0", ["1", "0"]), ("GPU-bb", ["GPU-bb"])]
)
def test_cuda_visible_devices_chooses_and_orders(visible: str, names: list[str]) -> None:
    assert [gpu.name for gpu in parse_gpus(LISTING, visible)] == names


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_no_gpu_left_is_an_error(visible: str) -> None:
    with pytest.raises(CommandError, match="no GPU that this process may use"):
        parse_gpus(LISTING, visible)


def test_an_engine_alone_on_its_gpu_decides_for_itself() -> None:
    gpus = [Gpu("0", 80 * GIB), Gpu("1", 80 * GIB)]
    assert share_gpus(gpus, 2, GIB) == [Share("0", None), Share("1", None)]


def test_engines_on_one_gpu_share_what_is_free() -> None:
    shares = share_gpus([Gpu("0", 80 * GIB)], 2, 10 * GIB)
    assert shares[0] == shares[1]
    kv_bytes = shares[0].kv_memory
    assert kv_bytes is not None
    assert 2 * (kv_bytes + 10 * GIB + CONTEXT_BYTES) == int(80 * GIB * USED_SHARE)


def test_three_engines_on_two_gpus_leave_one_alone() -> None:
    shares = share_gpus([Gpu("0", 80 * GIB), Gpu("1", 80 * GIB)], 3, GIB)
    assert [share.gpu for share in shares] == ["0", "1", "0"]
    assert shares[1].kv_memory is None
    assert shares[0].kv_memory is not None


def test_too_many_engines_for_a_gpu_are_refused_with_the_numbers() -> None:
    with pytest.raises(CommandError, match="GPU 0 has 8192 MiB free, too little for 2 engines"):
        share_gpus([Gpu("0", 8 * GIB)], 2, 4 * GIB)

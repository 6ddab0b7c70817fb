"""Which GPUs the engines of one machine use, and how engines share one."""

from __future__ import annotations

import pytest

from baton_cli.errors import CommandError
from baton_cli.local_pool.gpus import CONTEXT_BYTES, Gpu, Share, choose_gpus, parse_gpus, share_gpus

GIB = 1 << 30
LISTING = "0, GPU-aa, 80000, 81559\n1, GPU-bb, 40000, 46068\n"


def idle(name: str, gib: int) -> Gpu:
    return Gpu(name, gib * GIB, gib * GIB)


def test_without_cuda_visible_devices_every_gpu_is_used() -> None:
    assert parse_gpus(LISTING, None) == [
        Gpu("0", 80000 << 20, 81559 << 20),
        Gpu("1", 40000 << 20, 46068 << 20),
    ]


@pytest.mark.parametrize(
    ("visible", "names"), [("1", ["1"]), ("1,0", ["1", "0"]), ("GPU-bb", ["GPU-bb"])]
)
def test_cuda_visible_devices_chooses_and_orders(visible: str, names: list[str]) -> None:
    assert [gpu.name for gpu in parse_gpus(LISTING, visible)] == names


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_cuda_visible_devices_without_any_gpu_is_an_error(visible: str) -> None:
    with pytest.raises(CommandError, match="this process may use no GPU"):
        parse_gpus(LISTING, visible)


def test_memory_of_other_processes_counts_against_the_usable_share() -> None:
    assert Gpu("0", free=70 * GIB, total=80 * GIB).usable(0.5) == 30 * GIB
    assert Gpu("0", free=10 * GIB, total=80 * GIB).usable(0.5) == 0


def test_cuda_n_is_the_nth_visible_gpu() -> None:
    gpus = [idle("4", 80), idle("7", 80)]
    assert choose_gpus(gpus, "cuda") == gpus
    assert choose_gpus(gpus, "cuda:1") == [gpus[1]]
    with pytest.raises(CommandError, match="--device cuda:2: the GPU does not exist"):
        choose_gpus(gpus, "cuda:2")


def test_an_engine_alone_on_its_gpu_gets_no_kv_memory_limit() -> None:
    gpus = [idle("0", 80), idle("1", 80)]
    assert share_gpus(gpus, 2, GIB, 0.9) == [Share("0", None), Share("1", None)]


def test_engines_on_one_gpu_share_its_usable_memory() -> None:
    shares = share_gpus([idle("0", 80)], 2, 10 * GIB, 0.9)
    assert shares[0] == shares[1]
    kv_bytes = shares[0].kv_memory
    assert kv_bytes is not None
    assert 2 * (kv_bytes + 10 * GIB + CONTEXT_BYTES) == 72 * GIB


def test_of_three_engines_on_two_gpus_only_two_share_a_gpu() -> None:
    shares = share_gpus([idle("0", 80), idle("1", 80)], 3, GIB, 0.9)
    assert [share.gpu for share in shares] == ["0", "1", "0"]
    assert shares[1].kv_memory is None
    assert shares[0].kv_memory is not None


def test_too_many_engines_for_a_gpu_are_refused_with_the_numbers() -> None:
    with pytest.raises(CommandError, match=r"GPU 0 has 7\.2 GiB .* 2 engines that need 5\.0 GiB"):
        share_gpus([idle("0", 8)], 2, 4 * GIB, 0.9)

"""Which GPUs the engines of one machine use, and how engines share one. nvidia-smi is a script."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from baton_cli.errors import CommandError
from baton_cli.local_pool.gpus import (
    CONTEXT_BYTES,
    Gpu,
    Memory,
    Share,
    choose_gpus,
    list_gpus,
    share_gpus,
    time_slicing,
)

pytestmark = pytest.mark.integration

GIB = 1 << 30
H100 = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
OTHER_H100 = "GPU-5d5bffff-0c1e-8a5f-93b1-3f1c8a0d9c11"
T4 = "GPU-0aa77b6e-51e2-4f0c-bd0a-7f5fd8f6c2d9"
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
# Lines of: nvidia-smi --query-gpu=index,uuid,memory.free,memory.total,mig.mode.current,name
ALIKE = (
    f"0, {H100}, 80994, 81559, Disabled, NVIDIA H100 80GB HBM3\n"
    f"1, {OTHER_H100}, 40000, 81559, Disabled, NVIDIA H100 80GB HBM3\n"
)
UNLIKE = (
    f"0, {T4}, 15000, 15360, [N/A], Tesla T4\n"
    f"1, {H100}, 80994, 81559, Disabled, NVIDIA H100 80GB HBM3\n"
)
FIRST = Gpu(H100, Memory(80994 << 20, 81559 << 20))
SECOND = Gpu(OTHER_H100, Memory(40000 << 20, 81559 << 20))
SMALL = Gpu(T4, Memory(15000 << 20, 15360 << 20))


@pytest.fixture(autouse=True)
def _only_the_nvidia_smi_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def install_nvidia_smi(folder: Path, output: str, code: int = 0) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho {shlex.quote(output.strip())}\nexit {code}\n")
    script.chmod(0o755)


def idle(name: str, gib: int) -> Gpu:
    return Gpu(name, Memory(gib * GIB, gib * GIB))


def variables(visible: str | None, order: str = "") -> dict[str, str]:
    chosen = {"CUDA_DEVICE_ORDER": order} if order else {}
    return chosen if visible is None else {"CUDA_VISIBLE_DEVICES": visible, **chosen}


@pytest.mark.parametrize(
    ("listing", "environment", "gpus"),
    [
        # All GPUs, by UUID.
        (ALIKE, variables(None), [FIRST, SECOND]),
        (UNLIKE, variables(None), [SMALL, FIRST]),
        # Numbers are nvidia-smi's where CUDA has the same order.
        (ALIKE, variables("1"), [SECOND]),
        (ALIKE, variables("1, 0"), [SECOND, FIRST]),
        (UNLIKE, variables("0", "PCI_BUS_ID"), [SMALL]),
        # Unlike GPUs: CUDA puts the fastest first, which may be nvidia-smi's 1.
        (UNLIKE, variables("0"), [Gpu("0", None)]),
        (UNLIKE, variables("0", "FASTEST_FIRST"), [Gpu("0", None)]),
        (UNLIKE, variables(f"{T4},1"), [SMALL, Gpu("1", None)]),
        # UUIDs, whole and abbreviated. An abbreviation of two GPUs, and an unknown name, are kept.
        (ALIKE, variables(f"{OTHER_H100},{H100}"), [SECOND, FIRST]),
        (ALIKE, variables("GPU-5d5ba,GPU-5d5bf"), [FIRST, SECOND]),
        (ALIKE, variables("GPU-5d5b"), [Gpu("GPU-5d5b", None)]),
        (ALIKE, variables("GPU-ffff"), [Gpu("GPU-ffff", None)]),
        (ALIKE, variables(MIG), [Gpu(MIG, None)]),
        (ALIKE, variables(f"MIG-{H100}/1/0"), [Gpu(f"MIG-{H100}/1/0", None)]),
        # CUDA ignores everything from the first wrong entry on.
        (ALIKE, variables("1,-1,0"), [SECOND]),
        (ALIKE, variables("1,7,0"), [SECOND]),
        # Memory that nvidia-smi does not tell, and the memory of all instances of a GPU.
        (
            f"0, {H100}, [Insufficient Permissions], [N/A], Enabled, NVIDIA H100 80GB HBM3",
            variables(None),
            [Gpu(H100, None)],
        ),
        (
            f"0, {H100}, 80994, 81559, Enabled, NVIDIA H100 80GB HBM3",
            variables("0"),
            [Gpu(H100, None)],
        ),
        (f"0, {T4}, [N/A], [N/A], [N/A], NVIDIA GB10", variables(None), [Gpu(T4, None)]),
        # A message about a broken GPU among the lines.
        (
            f"Unable to determine the device handle for GPU1: 0000:3B:00.0: Unknown Error\n{ALIKE}",
            variables(None),
            [FIRST, SECOND],
        ),
    ],
)
def test_the_gpus_of_a_process_are_named_so_that_cuda_takes_the_ones_whose_memory_counts(
    listing: str, environment: dict[str, str], gpus: list[Gpu], tmp_path: Path
) -> None:
    install_nvidia_smi(tmp_path, listing)
    assert list_gpus(environment) == gpus


@pytest.mark.parametrize("visible", ["", "-1", "7", "NoDevFiles"])
def test_cuda_visible_devices_without_any_gpu_is_an_error(visible: str, tmp_path: Path) -> None:
    install_nvidia_smi(tmp_path, ALIKE)
    with pytest.raises(CommandError, match=rf"may use no GPU \(CUDA_VISIBLE_DEVICES={visible}\)"):
        list_gpus(variables(visible))


def test_nvidia_smi_that_is_missing_fails_or_lists_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"nvidia-smi does not answer: .*nvidia-smi"):
        list_gpus({})
    install_nvidia_smi(tmp_path, "No devices were found", code=6)
    with pytest.raises(CommandError, match=r"nvidia-smi does not answer: .* exit status 6"):
        list_gpus({})
    install_nvidia_smi(tmp_path, "No devices were found")
    with pytest.raises(CommandError, match=r"this process may use no GPU$"):
        list_gpus({})


def test_memory_of_other_processes_counts_against_the_usable_share() -> None:
    assert Memory(free=70 * GIB, total=80 * GIB).usable(0.5) == 30 * GIB
    assert Memory(free=10 * GIB, total=80 * GIB).usable(0.5) == 0


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


def test_engines_share_no_gpu_whose_memory_is_unknown() -> None:
    instances = [Gpu(MIG, None), Gpu("MIG-2", None)]
    assert share_gpus(instances, 2, GIB, 0.9) == [Share(MIG, None), Share("MIG-2", None)]
    with pytest.raises(CommandError, match=rf"memory of the GPU {MIG} is unknown, so 2 engines"):
        share_gpus(instances, 3, GIB, 0.9)


@pytest.mark.parametrize(
    ("names", "start"),
    [
        ([], ""),
        ([H100], ""),
        ([H100, OTHER_H100], ""),
        ([H100, H100], f"2 nodes on {H100}: "),
        ([H100, T4, H100, T4, H100], f"3 nodes on {H100}, 2 nodes on {T4}: "),
    ],
)
def test_nodes_that_take_turns_on_a_gpu_are_one_line_with_the_remedy(
    names: list[str], start: str, tmp_path: Path
) -> None:
    line = time_slicing(names, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")})
    assert line.partition("without")[0] == start
    assert "\n" not in line
    assert ("nvidia-cuda-mps-control -d" in line) == bool(start)


def test_nodes_on_a_gpu_with_a_running_mps_daemon_take_no_turns(tmp_path: Path) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert time_slicing([H100, H100], environment)
    (tmp_path / "control").touch()
    assert time_slicing([H100, H100], environment) == ""

"""Which kernels an engine uses, and the errors when they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_cli.commands.role_settings import node_settings
from baton_cli.options.records import NodeOptions
from baton_engine.attention.selector import choose_kernels
from baton_engine.build import build_runner
from baton_engine.config.engine_config import TorchSettings
from baton_engine.errors import SettingsError
from baton_node.engine.build_engine import build_engine
from baton_node.errors import SetupError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_is_torch_on_a_cpu_and_triton_on_a_gpu() -> None:
    assert choose_kernels("auto", CPU, "bfloat16") == "torch"
    assert choose_kernels("auto", CUDA, "float32") == "triton"


def test_named_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernels("torch", CUDA, "bfloat16") == "torch"
    assert choose_kernels("triton", CPU, "float32") == "triton"


def test_triton_on_a_cpu_requires_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SettingsError, match=r"--kernels triton on cpu .* set TRITON_INTERPRET=1"):
        choose_kernels("triton", CPU, "float32")


def test_bfloat16_is_refused_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SettingsError, match=r"--dtype bfloat16 .* use --dtype float32"):
        choose_kernels("triton", CPU, "bfloat16")


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_without_triton_gpu_kernels_are_refused(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SettingsError, match=rf"--kernels {kernels} on cuda needs triton"):
        choose_kernels(kernels, CUDA, "bfloat16")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "cutlass"}, "--kernels cutlass is unknown; use auto, torch, triton"),
        ({"kernels": "triton", "dtype": "bfloat16"}, "--dtype bfloat16"),
    ],
)
def test_bad_kernel_settings_are_refused_before_weights_are_read(
    settings: dict[str, Any],
    message: str,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SettingsError, match=message):
        build_runner(TorchSettings(model=tiny_model("llama-gqa4"), kv_blocks=8, **settings))


@pytest.mark.integration
def test_the_kernels_flag_reaches_a_nodes_engine(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folder = str(tiny_model("llama-gqa4"))
    options = NodeOptions(model=folder, kernels="triton", dtype="bfloat16")
    with pytest.raises(SetupError, match="--dtype bfloat16 is computed wrongly"):
        build_engine(node_settings(options, "decode"))


@pytest.mark.integration
def test_the_kernels_flag_reaches_generate(tiny_model: Callable[[str], Path]) -> None:
    arguments = ["generate", "--model", str(tiny_model("llama-gqa4")), "--prompt", "a"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "baton_cli", *arguments, "--kernels", "triton"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert "--kernels triton on cpu runs in triton's interpreter alone" in done.stderr

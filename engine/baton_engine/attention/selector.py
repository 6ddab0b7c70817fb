"""Choose an engine's kernels, before its weights are read.

In: the user's choice, the device and the dtype. Out: "torch" or "triton". Imports triton only if it
is needed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch

from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.attention.interface import AttentionBackend
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import SettingsError
from baton_engine.kv.kv_pool import TorchMemory

Kernels = Literal["torch", "triton"]


def choose_kernels(asked: str, device: torch.device, dtype: str) -> Kernels:
    """The kernels for `asked` ("auto", "torch" or "triton"). Raises SettingsError if triton is
    needed but is missing, or cannot run on this device or with this dtype."""
    if asked == "torch" or (asked == "auto" and device.type == "cpu"):
        return "torch"
    if find_spec("triton") is None:
        raise SettingsError(
            f"--kernels {asked} on {device.type} needs triton, which is not installed; "
            "pip install triton, or use --kernels torch"
        )
    import triton

    interpreted: bool = triton.knobs.runtime.interpret
    if device.type == "cpu" and not interpreted:
        raise SettingsError(
            "--kernels triton on cpu runs in triton's interpreter alone, for tests: set "
            "TRITON_INTERPRET=1, or use --kernels torch"
        )
    if interpreted and dtype == "bfloat16":
        raise SettingsError(
            "--dtype bfloat16 is computed wrongly by triton's interpreter; use --dtype float32, "
            "or unset TRITON_INTERPRET"
        )
    return "triton"


def attention_for(
    kernels: Kernels,
    memory: TorchMemory,
    config: ModelConfig,
    *,
    exact: bool = False,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The backend for these kernels. With `exact`, those of triton do not let bits depend on the
    batch; torch's never do on a CPU. `dtype` is the compute dtype, which a pool of codes does not
    say."""
    if kernels == "torch":
        return TorchAttention(memory, config.attention, dtype=dtype)
    from baton_engine.attention.triton_backend import TritonAttention

    return TritonAttention(memory, config.attention, exact=exact)

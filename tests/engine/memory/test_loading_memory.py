"""Loading a quantized model takes little more memory than the model.

The peak is the kernel's count of the resident pages of a process (VmHWM, reset before the model is
loaded), with the pages of the checkpoint's file that it has mapped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.engines.quantized.quantized_models import LAYOUTS

# TinyLlama-1.1B's sizes.
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 2048, 5632, 22, 32, 4, 32000
LAYOUT = "w4a16 g32"
GROUP = 32
MOST = 1.3  # times the file
SCRIPT = """
import json, re, sys, tempfile
from pathlib import Path
from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings

def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

folder, quantization = Path(sys.argv[1]), sys.argv[2]
settings = dict(dtype="bfloat16", threads=2, kv_blocks=64, max_model_len=512)
# The code of libraries and kernels is there before.
small = Path(tempfile.mkdtemp())
config = json.loads((folder / "config.json").read_text())
config |= dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1, vocab_size=1000)
config.pop("quantization_config", None)
(small / "config.json").write_text(json.dumps(config))
build_torch(TorchSettings(model=small, load_format="dummy", quantization="int4", **settings))
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
engine = build_torch(TorchSettings(model=folder, quantization=quantization, **settings))
print(memory("VmHWM") - before)
"""


def write_model(folder: Path, quantized: bool) -> int:
    """Write random weights in the shape; returns the file's size."""
    noise = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}

    def plain(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = torch.full(shape, 0.01, dtype=torch.bfloat16)

    def linear(name: str, outputs: int, inputs: int) -> None:
        if not quantized:
            numbers = torch.randn(outputs, inputs, generator=noise) * 0.02
            tensors[f"{name}.weight"] = numbers.to(torch.bfloat16)
            return
        words = torch.randint(-(1 << 31), 1 << 31, (outputs, inputs // 8), generator=noise)
        tensors[f"{name}.weight_packed"] = words.to(torch.int32)
        tensors[f"{name}.weight_scale"] = torch.full((outputs, inputs // GROUP), 0.005)
        tensors[f"{name}.weight_shape"] = torch.tensor([outputs, inputs])

    for name in ("model.embed_tokens", "lm_head"):
        plain(name, VOCAB, HIDDEN)
    plain("model.norm", HIDDEN)
    keys = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        plain(f"{here}.input_layernorm", HIDDEN)
        plain(f"{here}.post_attention_layernorm", HIDDEN)
        for part, outputs in (("q", HIDDEN), ("k", keys), ("v", keys), ("o", HIDDEN)):
            linear(f"{here}.self_attn.{part}_proj", outputs, HIDDEN)
        linear(f"{here}.mlp.gate_proj", INNER, HIDDEN)
        linear(f"{here}.mlp.up_proj", INNER, HIDDEN)
        linear(f"{here}.mlp.down_proj", HIDDEN, INNER)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    if quantized:
        config["quantization_config"] = LAYOUTS[LAYOUT].config
    (folder / "config.json").write_text(json.dumps(config))
    return (folder / "model.safetensors").stat().st_size


def peak_of_loading(folder: Path, quantization: str) -> int:
    command = [sys.executable, "-c", SCRIPT, str(folder), quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.long
def test_loading_a_quantized_model_of_a_billion_weights_takes_little_more_than_its_file(
    tmp_path: Path,
) -> None:
    size = write_model(tmp_path, quantized=True)
    assert peak_of_loading(tmp_path, "none") < MOST * size


@pytest.mark.long
def test_a_plain_model_is_never_in_memory_while_it_is_quantized(tmp_path: Path) -> None:
    size = write_model(tmp_path, quantized=False)
    assert peak_of_loading(tmp_path, "int4") < 0.75 * size

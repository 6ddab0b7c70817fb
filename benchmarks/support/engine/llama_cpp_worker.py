"""llama.cpp in the peers' own environment, driven through a pipe.

    .venv-peers/bin/python benchmarks/support/engine/llama_cpp_worker.py FILE THREADS TOKENS

FILE is a GGUF file, and TOKENS the length of a prompt with its answer at most. In, a line of JSON
each: {"prompt", "new_tokens"}. Out: {"prompt", "decode"}, tokens per second as llama.cpp measures
them itself; first of all {"version", "system"}. Imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any


def main() -> None:
    # What libraries print goes to stderr: stdout is the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    file, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = file
    params.n_ctx = tokens
    params.n_batch = params.n_ubatch = tokens
    params.n_parallel = 1
    params.cache_prompt = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = llama.Server(params)
    system = llama.get_system_info()
    answers.write(json.dumps({"version": version("xllamacpp"), "system": system}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        found = server.handle_completions(
            {
                "prompt": order["prompt"],
                "n_predict": order["new_tokens"],
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        times = found["timings"]
        rates = {"prompt": times["prompt_per_second"], "decode": times["predicted_per_second"]}
        answers.write(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()

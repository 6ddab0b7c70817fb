"""Drives torch engines and runners in the engine's tests, with bounded loops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.quantization.kv_cache import CODES_OF
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Row, Runner, Sample, TokenOut
from baton_engine.memory.requirements import groups_of
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.engine_core import run_all

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def small_engine(folder: Path, **settings: Any) -> EngineCore:
    """A torch engine on one thread in fp32, with a pool of 200 blocks and chunks of 2 blocks.
    `kv_blocks` is per group of layers. On CUDA it records 6 graphs instead of 35, unless a number
    of sequences is given."""
    chosen = {"dtype": "float32", "threads": 1, "kv_blocks": 200, "chunk_blocks": 2, **settings}
    if chosen.get("device") == "cuda":
        chosen.setdefault("max_num_seqs", 20)
    if chosen["kv_blocks"] is not None:
        kept = CODES_OF.get(chosen.get("kv_cache_dtype", "auto"), "float32")
        chosen["kv_blocks"] *= max(1, len(groups_of(read_config(folder), kept)))
    return build_torch(TorchSettings(model=folder, **chosen))


def run_requests(
    engine: EngineCore, requests: Sequence[Request]
) -> dict[RequestId, list[TokenOut]]:
    """Submit all requests, and step until all have ended."""
    tokens: dict[RequestId, list[TokenOut]] = {request.id: [] for request in requests}
    for token in run_all(engine, requests).tokens:
        tokens[token.request].append(token)
    return tokens


def make_request(name: str, prompt: Sequence[int], params: SamplingParams = GREEDY) -> Request:
    return Request(
        id=RequestId(name),
        attempt=0,
        prompt_ids=tuple(prompt),
        params=params,
        outputs=((),) * params.n,
    )


def generate_ids(
    engine: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Return the ids generated for each prompt; all are submitted at once (params.n == 1)."""
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    tokens = run_requests(engine, requests)
    return [[token.id for token in tokens[request.id]] for request in requests]


def ask(position: int, params: SamplingParams = GREEDY, choice: int = 0) -> tuple[Sample, ...]:
    return (Sample(choice, position, params),)


def decode_alone(
    runner: Runner, known: Sequence[int], blocks: Sequence[BlockId], steps: int
) -> list[int]:
    """Return `steps` greedy ids after `known`. `blocks` hold the KV of all known tokens but the
    last."""
    ids = list(known)
    for _ in range(steps):
        end = len(ids)
        [result] = runner.launch([Row(ids[-1:], end - 1, blocks, ask(end))]).read()
        ids.append(result.samples[0].id)
    return ids[len(known) :]

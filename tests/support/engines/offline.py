"""The offline API over the simulated engine, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_engine.llm_engine import LLMEngine
from baton_engine.offline.model_text import ModelText
from baton_engine.offline.outputs import RequestOutput
from baton_engine.offline.prompts import Prompt
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.sampling import SamplingParams
from baton_text.artifacts import byte_artifacts


def byte_text() -> ModelText:
    """The text of the simulated engine's byte tokenizer."""
    return ModelText.from_artifacts(byte_artifacts())


def sim_llm_engine(*, seed: int | None = None, stream_interval: int = 1, **sim: Any) -> LLMEngine:
    """An LLMEngine without a model. `sim` are fields of SimSettings."""
    core = build_sim(SimSettings(**({"num_blocks": 500} | sim)))
    return LLMEngine(core, byte_text(), seed=seed, stream_interval=stream_interval)


def run_to_end(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Run all requests; return their outputs by id, in order. Check that no block is left."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.engine_core.check_integrity()
    load = engine.engine_core.load()
    assert load.free_blocks == load.total_blocks
    return outputs


def answers(
    engine: LLMEngine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """The last output of each prompt."""
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, each)
    outputs = run_to_end(engine)
    return [outputs[str(number)][-1] for number in range(len(prompts))]

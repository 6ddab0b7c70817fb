"""The answers of one family's tiny model, on all paths of the engine.

In: the name of a tiny model. Out: checks. In fp32 greedy ids equal those of transformers on the
same device; a difference is accepted where the two candidates' logits are within 1e-4, as in the
tests. In bf16 with --batch-invariant on, ids and log-probabilities are compared as integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from baton_engine import LLM, StructuredOutputsParams
from baton_engine.core.engine_core import EngineCore
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.in_order import Task, run_in_order
from benchmarks.gpu.rival import loaded_model, references
from benchmarks.gpu.stepping import complete
from tests.bits.cells import Bench
from tests.bits.paths import PATHS
from tests.support.engines.exactness import Reference, Tally, compare
from tests.support.engines.tiny_models import make_tiny_model, prompt_of
from tests.support.engines.torch_engines import small_engine

STORE_MEMORY = 256 << 20
PROMPTS, PROMPT = 4, 150
KNOWN = (0, 7, 13, 22)  # tokens of its answer that each request comes with
CHOICES = 3
# Choices that share a prompt of 10 blocks, and grow by 2 or more each, do not fit these blocks. One
# of them does.
CROWD, FEW_BLOCKS = 8, 20
TEXTS = ("the prefill node computes ", "tokens known and tokens computed: ")
PATTERN = "[a-z]{3,8}( [a-z]{3,8}){2,4}"
# A path of equal bits may take long to compile.
TASK_S = 5.0

VARIANTS: Mapping[str, dict[str, Any]] = {
    "graphs, overlap": {"overlap": "on"},
    "no graphs": {"overlap": "on", "enforce_eager": True},
    "no overlap": {"overlap": "off"},
    "chunked": {"max_batched_tokens": 40},
}
DRY_VARIANTS = ("graphs, overlap",)
INTERPRETED = {"kernels": "triton", "overlap": "on"}


@dataclass(frozen=True)
class Family:
    """One model; `number` is its place among the `models`, and decides which paths of equal bits it
    takes."""

    findings: Findings
    model: str
    number: int
    models: int

    @property
    def new_tokens(self) -> int:
        return 24 if self.findings.dry else 40

    @cached_property
    def folder(self) -> Path:
        return make_tiny_model(self.model)

    @cached_property
    def references(self) -> list[Reference]:
        prompts = [self.prompt(number) for number in range(PROMPTS)]
        return references(self._model(), prompts, self.new_tokens)

    def _model(self) -> Any:
        return loaded_model(self.folder, self.findings.device)

    def prompt(self, number: int) -> list[int]:
        return prompt_of(PROMPT, seed=number)

    def run(self) -> None:
        """All checks; the target of a process."""
        torch.set_num_threads(1)
        tasks = [Task(f"{self.model}: transformers", TASK_S, self._refer)]
        for name in DRY_VARIANTS if self.findings.dry else VARIANTS:
            tasks.append(self._task(name, partial(self.variant, name)))
        tasks.append(self._task("preempted", self.preempted))
        if self.findings.dry:
            tasks.append(self._task("interpreted kernels", self.interpreted))
        tasks.append(self._task("handed off", self.handed_off))
        tasks.append(self._task("grammar", self.grammar))
        tasks += [
            self._task(f"equal bits, {path}", partial(self.equal_bits, path))
            for path in self.bits_paths
        ]
        run_in_order(self.findings, tasks)

    def _task(self, name: str, act: Callable[[], str]) -> Task:
        """A task that is a check: `act` returns its note, or raises."""
        name = f"{self.model}, {name}"
        return Task(name, TASK_S, lambda: self.findings.checked(name, True, act()))

    def _refer(self) -> None:
        assert len(self.references) == PROMPTS

    # --- as transformers --------------------------------------------------------------------------

    def engine(self, **settings: Any) -> EngineCore:
        """Few sizes of graphs are recorded."""
        usual = {"device": str(self.findings.device), "max_num_seqs": 20}
        return small_engine(self.folder, **{**usual, **settings})

    def requests(self) -> list[tuple[Request, int]]:
        """Requests of different lengths, and how many tokens of its reference each comes with; the
        last has several choices."""
        made = []
        for number, known in enumerate(KNOWN):
            ids = (*self.prompt(number), *self.references[number].ids[:known])
            made.append((self._request(str(number), ids, self.new_tokens - known), known))
        made.append((self._request("n", self.prompt(0), self.new_tokens, n=CHOICES), 0))
        return made

    def _request(self, name: str, ids: Sequence[int], new_tokens: int, n: int = 1) -> Request:
        params = SamplingParams(n=n, temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return Request(
            id=RequestId(name), attempt=0, prompt_ids=tuple(ids), params=params, outputs=((),) * n
        )

    def variant(self, name: str) -> str:
        return str(self._as_references(self.engine(**VARIANTS[name]), self.requests()))

    def preempted(self) -> str:
        """The youngest choices are preempted when older ones need blocks."""
        engine = self.engine(kv_blocks=FEW_BLOCKS)
        crowd = self._request("n", self.prompt(0), self.new_tokens, n=CROWD)
        tally = self._as_references(engine, [(crowd, 0)])
        preemptions = engine.load().preemptions_total
        assert preemptions > 0, "nothing was preempted"
        return f"{tally}; {preemptions} preemptions"

    def _as_references(self, engine: EngineCore, requests: Sequence[tuple[Request, int]]) -> Tally:
        """Run all requests together, and compare each choice."""
        found = complete(engine, [request for request, _ in requests])
        engine.check_integrity()
        tally = Tally()
        for request, known in requests:
            for choice in range(request.params.n):
                number = 0 if request.id == "n" else int(request.id)
                self._compare(number, known, found[request.id, choice], tally, request.id)
        tally.check()
        return tally

    def _compare(
        self, number: int, known: int, ids: Sequence[int], tally: Tally, label: str
    ) -> None:
        whole = self.references[number]
        compare(Reference(whole.ids[known:], whole.candidates[known:]), ids, tally, label)

    def interpreted(self) -> str:
        """A dry run's kernels; a step of them takes a second."""
        prompt, new_tokens = self.prompt(0)[:8], 2
        [expected] = references(self._model(), [prompt], new_tokens)
        found = complete(self.engine(**INTERPRETED), [self._request("0", prompt, new_tokens)])
        tally = Tally()
        compare(expected, found["0", 0], tally)
        return str(tally)

    def handed_off(self) -> str:
        """A prefill node computes the prompts, a decode node the rest, through a real Redis."""
        from tests.bits.store_paths import PLENTY, finish
        from tests.support.nodes.step_loops import LoopNode, hand_off, store_node

        tally = Tally()
        requests = [each for each in self.requests() if each[0].params.n == 1]
        with ExitStack() as stack:
            store = stack.enter_context(EmbeddedStore(STORE_MEMORY))
            nodes: list[LoopNode] = []
            for name in ("prefill", "decode"):
                node = store_node(name, store, engine=self.engine(), write_behind=PLENTY)
                stack.callback(node.close)
                nodes.append(node)
            prefill, decode = nodes
            for request, _ in requests:
                hand_off(prefill, decode, request)
            finish(nodes, decode, [request for request, _ in requests])
            reused = decode.loop.counters["reused_chunks"]
            for request, known in requests:
                ids = (*prefill.ids(request.id)[:1], *decode.ids(request.id))
                self._compare(int(request.id), known, ids, tally, request.id)
        tally.check()
        assert reused >= len(requests), f"{reused} chunks came from the store"
        return f"{tally}; {reused} chunks came from the store"

    # --- others -----------------------------------------------------------------------------------

    def grammar(self) -> str:
        """An answer that a grammar bounds is the same with graphs and overlap as without."""
        params = SamplingParams(
            temperature=0.0, max_tokens=60, structured=StructuredOutputsParams(regex=PATTERN)
        )
        found = []
        for changes in ({"overlap": "on"}, {"overlap": "off", "enforce_eager": True}):
            llm = LLM(
                self.folder,
                dtype="float32",
                device=str(self.findings.device),
                threads=1,
                kv_memory=64 << 20,
                max_num_seqs=20,
                **changes,
            )
            outputs = [each.outputs[0] for each in llm.generate(TEXTS, params)]
            for output in outputs:
                if output.finish_reason == "stop":
                    assert re.fullmatch(PATTERN, output.text), f"{output.text!r} does not match"
            found.append([output.token_ids for output in outputs])
        assert found[0] == found[1], f"{found[0]} with graphs and overlap, {found[1]} without"
        return f"{sum(map(len, found[0]))} tokens"

    @property
    def bits_paths(self) -> list[str]:
        """Together the models take all paths, and each takes one or two."""
        from tests.bits.store_paths import STORE_PATHS

        paths = [*PATHS, *STORE_PATHS]
        if self.findings.dry:
            return ["several choices"]
        return paths[self.number :: self.models]

    def equal_bits(self, path: str) -> str:
        from tests.bits.store_paths import STORE_PATHS

        with ExitStack() as stack:
            store = None
            if path in STORE_PATHS:
                store = stack.enter_context(EmbeddedStore(STORE_MEMORY))
            device = str(self.findings.device)
            bench = FewGraphs(self.folder, "bfloat16", store, device, thorough=False)
            {**PATHS, **STORE_PATHS}[path](bench)
        return "bfloat16"


class FewGraphs(Bench):
    """A bench whose engines record few sizes of graphs."""

    def engine(self, **settings: Any) -> EngineCore:
        return super().engine(**{"max_num_seqs": 64, **settings})

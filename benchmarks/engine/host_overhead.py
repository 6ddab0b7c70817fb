"""The host's work in a decode step: 256 running requests, with a stub for the forward pass.

    python -m benchmarks.engine.host_overhead [--quick] [--profile]

Two goals. The host work of a step (schedule, batch, update) takes at most 0.5 ms of one core: for
the core alone, with a runner that returns the same token for every row, with one step in flight and
with two; and with the torch runner, whose model returns zeros. Prefix-cache bookkeeping that finds
nothing (naming blocks, registering them, forgetting the previous content) takes under 1 % of a step
of 3.4 ms, the mean of the lower bound of Qwen3-0.6B's reference workload on an H200.

Times are the thread's CPU time, the median of the passes, so other programs do not change them.
Every allocated block held something before. --profile prints the lines of code that take most time.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from unittest.mock import Mock, patch

import torch

from baton_engine.attention.interface import StepAttention, StepBatch
from baton_engine.config.model_config import ModelConfig, RopeConfig
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import (
    ComputedStep,
    EngineInfo,
    KVMemory,
    Row,
    RowResult,
    Runner,
    Sampled,
)
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.ops import TorchOps
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder
from baton_engine.runner.forward import Forward
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.sampling.metadata import Draws
from baton_engine.scheduling.sequence import Sequence as Choice
from baton_protocol.ids import Fingerprint, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.support.figures import Verdict, at_most, exit_code, machine, spread

LIVE = 256
PROMPT = (256, 768)  # tokens; of all lengths, so that in each step a sixteenth begins a block
LONGEST = 4096  # tokens that a padded line's table has room for
STEP_LIMIT_MS = 0.5
FLOOR_STEP_MS = 3.4
BOOKS_SHARE = 0.01
SAMPLE_S = 0.001
LINES_SHOWN = 10
VOCAB = 16
LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=2, block_size=16, dtype="float32", chunk_blocks=8
)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    norm_eps=1e-6,
    max_positions=1 << 20,
    tied=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig(type="default", theta=10_000.0),
    eos_ids=(),
    dtype="float32",
)
# What is measured: temperature, and whether two steps are under way.
CASES = (
    ("core alone", 0.0, False),
    ("core alone, overlap", 0.0, True),
    ("torch runner, greedy", 0.0, False),
    ("torch runner, sampled", 0.6, False),
    ("padded runner, greedy", 0.0, False),
    ("padded runner, sampled", 0.6, False),
)
# The parts of the prefix cache's books; none of them calls another.
BOOKS = (
    (Choice, "hash_spans"),
    (BlockPool, "register"),
    (BlockPool, "cached"),
    (BlockPool, "_forget"),
)


class SameToken:
    """A Runner that costs nothing."""

    def __init__(self, memory: TorchMemory) -> None:
        self.memory: KVMemory = memory
        self._result, self._nothing = RowResult((Sampled(1),)), RowResult()

    def launch(self, rows: Sequence[Row]) -> ComputedStep:
        return ComputedStep([self._result if row.samples else self._nothing for row in rows])


class NoDraw(TorchOps):
    """Drawing is the device's work, as the model is."""

    def __init__(self) -> None:
        self._ids_S = torch.zeros(LIVE, dtype=torch.int64)

    def draw(self, logits_SV: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self._ids_S[: len(logits_SV)]


class Zeros(Decoder):
    """A model that costs nothing, and says id 0."""

    def __init__(self) -> None:
        super().__init__(MODEL, WeightSlots(torch.float32, torch.device("cpu"), NoDraw()))
        self._hidden_TD = torch.zeros(LIVE * PROMPT[1], 1)
        self._logits_SV = torch.zeros(LIVE, VOCAB)

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        return self._hidden_TD[: len(tokens_T)]

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self._logits_SV[: len(hidden_SD)]


class NoAttention:
    """A backend that prepares nothing. The model never calls the attention of a step."""

    exact = False

    def __init__(self, *, recordable: bool) -> None:
        self.recordable = recordable
        self._step: StepAttention = Mock(spec=())

    def begin(self, batch: StepBatch) -> StepAttention:
        return self._step


def make_engine(kind: str, temperature: float, steps: int, *, overlap: bool = False) -> EngineCore:
    """256 requests that generate, in a pool whose other blocks all hold something."""
    num_blocks = LIVE * (PROMPT[1] + steps) // LAYOUT.block_size
    info = EngineInfo(
        kind="torch",
        model="host",
        fingerprint=Fingerprint("f" * 32),
        layout=LAYOUT,
        num_blocks=num_blocks,
        max_model_len=num_blocks * LAYOUT.block_size,
        max_batched_tokens=LIVE * PROMPT[1],  # all prompts in one step
        max_num_seqs=LIVE,
        vocab_size=VOCAB,
        eos_ids=(),
    )
    memory = TorchMemory(LAYOUT, num_blocks, torch.device("cpu"))
    engine = EngineCore(info, make_runner(kind, memory), overlap=overlap)
    draw = random.Random(0)
    fill = [PROMPT[1]] * (1 + num_blocks * LAYOUT.block_size // PROMPT[1])
    _submit(engine, draw, fill, 1, temperature, "old")
    while engine.has_work():
        engine.step()
    _submit(engine, draw, [draw.randint(*PROMPT) for _ in range(LIVE)], steps, temperature, "new")
    while engine.step().num_prompt_tokens:
        pass
    assert engine.load().running == LIVE
    return engine


def make_runner(kind: str, memory: TorchMemory) -> Runner:
    """The core's own; as on a CPU; or padded, as on a GPU, where what remains is one replay."""
    if kind == "core alone":
        return SameToken(memory)
    width = LONGEST // LAYOUT.block_size if kind == "padded runner" else 0
    sizes = (LIVE,) if width else ()
    model, attention = Zeros(), NoAttention(recordable=bool(sizes))
    forward = Forward(model, memory, attention, sizes=sizes, width=width)
    return TorchRunner(model, memory, attention, forward)


def _submit(
    engine: EngineCore,
    draw: random.Random,
    lengths: Sequence[int],
    new_tokens: int,
    temperature: float,
    name: str,
) -> None:
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=new_tokens, ignore_eos=True)
    for number, length in enumerate(lengths):
        prompt = tuple(draw.choices(range(VOCAB), k=length))
        id = RequestId(f"{name}-{number}")
        engine.submit(
            Request(id=id, attempt=0, prompt_ids=prompt, params=params, outputs=((),), salt=id)
        )


def host_ms(
    engine: EngineCore, steps: int, passes: int, clock: Callable[[], float] = time.thread_time
) -> list[float]:
    """CPU milliseconds per step, a number per pass."""
    found = []
    for _ in range(passes):
        began = clock()
        for _ in range(steps):
            engine.step()
        found.append((clock() - began) * 1e3 / steps)
    assert engine.load().running == LIVE, (
        "a request ended during the pass, so its steps are not comparable"
    )
    return found


def books_ms(engine: EngineCore, steps: int, passes: int) -> list[float]:
    """Milliseconds per step in the prefix cache's books, a number per pass."""
    found = []
    idle = idle_s()
    for _ in range(passes):
        with timed() as calls:
            for _ in range(steps):
                engine.step()
        found.append(spent_s(calls.values(), idle) * 1e3 / steps)
    return found


def spent_s(calls: Iterable[Sequence[float]], idle: float) -> float:
    """Of each part its median call times its calls, so that what interrupts one call is not told as
    its cost, less what timing a call that does nothing takes."""
    return sum((statistics.median(each) - idle) * len(each) for each in calls if each)


def noting(inner: Callable[..., object], note: Callable[[float], None]) -> Callable[..., object]:
    """`inner`, noting how long each call takes, in seconds."""

    def outer(*args: object, **named: object) -> object:
        began = time.perf_counter()
        result = inner(*args, **named)
        note(time.perf_counter() - began)
        return result

    return outer


def idle_s() -> float:
    """Seconds that noting() tells of a call that does nothing."""
    seen: list[float] = []
    nothing = noting(lambda *args, **named: None, seen.append)
    for _ in range(1000):
        nothing(1, 2, ends_chunk=False)
    return statistics.median(seen)


@contextmanager
def timed() -> Iterator[Mapping[str, list[float]]]:
    """Let the books note how long each of their calls takes, in seconds."""
    calls: dict[str, list[float]] = {name: [] for _, name in BOOKS}

    with ExitStack() as patches:
        for owner, name in BOOKS:
            noted = noting(getattr(owner, name), calls[name].append)
            patches.enter_context(patch.object(owner, name, noted))
        yield calls


def profile(engine: EngineCore, steps: int) -> None:
    """The lines that a step spends most in, by samples of CPU time: unlike a tracer, that makes no
    line dearer than it is. Time in C counts for the line that called it."""
    seen: Counter[tuple[str, int]] = Counter()

    def sample(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.startswith("<"):
            frame = frame.f_back  # made code, such as a dataclass's __init__: its caller counts
        if frame is not None:
            seen[frame.f_code.co_filename, frame.f_lineno] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    for _ in range(steps):
        engine.step()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    for (path, line), count in seen.most_common(LINES_SHOWN):
        where = f"{Path(path).name}:{line}"
        source = lines_of(path).get(line, "")
        print(f"    {count / seen.total():5.1%}  {where:22} {source}")


def lines_of(path: str) -> dict[int, str]:
    """Not linecache, which torch replaces by one that some modules break."""
    source = Path(path)
    text = source.read_text() if source.is_file() else ""
    return {number: line.strip() for number, line in enumerate(text.splitlines(), start=1)}


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    steps, passes = (20, 3) if options.quick else (options.steps, options.passes)
    print(f"{LIVE} live requests, {passes} passes of {steps} steps; {machine()}")
    verdicts = []
    room = steps * (3 * passes + 2)
    for name, temperature, overlap in CASES:
        engine = make_engine(name.partition(",")[0], temperature, room, overlap=overlap)
        host_ms(engine, steps, 1)
        values = host_ms(engine, steps, passes)
        verdict = at_most(values, STEP_LIMIT_MS, "ms")
        print(f"  {name:24} {spread(values, 3):>22} ms per step   {verdict.text}")
        verdicts.append(verdict)
        if name == "core alone":
            verdicts.append(books(engine, steps, passes))
        if options.profile:
            profile(engine, steps * passes)
    return exit_code(verdicts, quick=options.quick)


def books(engine: EngineCore, steps: int, passes: int) -> Verdict:
    values = books_ms(engine, steps, passes)
    shares = [100 * value / FLOOR_STEP_MS for value in values]
    verdict = at_most(shares, 100 * BOOKS_SHARE, "%")
    print(f"    of that prefix cache   {spread(values, 4):>22} ms per step")
    print(
        f"    of a {FLOOR_STEP_MS} ms step       {spread(shares):>22} %             {verdict.text}"
    )
    return verdict


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 passes of 20 steps")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="steps per pass")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

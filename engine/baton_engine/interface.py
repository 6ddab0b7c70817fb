"""What the engine is to the rest of a node; imports no torch.

    Engine        (EngineCore, in `core`) one scheduler and one block manager over a Runner
    Runner        computes a step: `runner` on real weights, `sim` on a timing model
    KVMemory      the paged pool as bytes, for transfers

All of Engine is called by one thread, the step loop. KVMemory may be used by transfer threads,
on blocks that the step loop holds for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from baton_protocol.ids import BlockHash, BlockId, Fingerprint, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import NodeLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Fixed facts of one engine."""

    kind: Literal["torch", "sim"]
    model: str
    fingerprint: Fingerprint
    layout: KVLayout
    num_blocks: int  # block 0 (padding) not counted
    max_model_len: int
    max_batched_tokens: int
    max_num_seqs: int
    vocab_size: int
    eos_ids: tuple[int, ...]


# --- between scheduler and runner -----------------------------------------------------------
# Of these and of TokenOut there are a thousand per step: structs are made in a third of the time of
# dataclasses, and without gc the collector does not walk them.


@dataclass(frozen=True, slots=True)
class PenaltyCounts:
    """What penalties look at: the prompt's distinct ids, and how often each id was generated. Kept
    up by the engine, read by the runner within the step; a function of the tokens alone."""

    prompt: Sequence[int]
    outputs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ListedIds:
    """The ids that a request lists, as arrays: made once, so that a runner takes them as they are
    in each step."""

    biased: array[int]
    biases: array[float]
    allowed: array[int] | None

    @classmethod
    def of(cls, params: SamplingParams) -> ListedIds:
        allowed = params.allowed_token_ids
        return cls(
            array("q", (id for id, _ in params.logit_bias)),
            array("f", (bias for _, bias in params.logit_bias)),
            None if allowed is None else array("q", allowed),
        )


class Matcher(Protocol):
    """One choice's place in a grammar, see `baton_text.grammar`; a function of its tokens."""

    def copy(self) -> Matcher: ...

    def accept(self, ids: Sequence[int]) -> bool:
        """The choice has these tokens more. After False the matcher has `stopped`."""

    @property
    def stopped(self) -> bool:
        """Nothing but EOS may follow, or nothing at all (`error`)."""

    @property
    def error(self) -> str:
        """Why it cannot go on although the text is not complete; "" if it can."""

    def mask(self) -> bytes:
        """One bit per id, least significant first: 1 if it may follow."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """Ask for one token at the row's last position. `position` is the new token's index
    in prompt + output, the noise's key with (seed, choice). `banned` ids get no probability (EOS
    and stop ids before min_tokens, ends of bad words). `seen` is set where the parameters hold a
    penalty; without `listed` the runner reads the parameters. With a `matcher` only ids of its
    mask are sampled; the runner asks for the mask when it samples, while the device computes."""

    choice: int
    position: int
    params: SamplingParams
    banned: tuple[int, ...] = ()
    seen: PenaltyCounts | None = None
    listed: ListedIds | None = None
    matcher: Matcher | None = None


class PromptAsk(msgspec.Struct, frozen=True, gc=False):
    """Ask how likely the prompt itself is: `targets[i]` is the token behind the row's i-th (the
    prompt's last has none), each wanted with the `top` likeliest."""

    targets: tuple[int, ...]
    top: int


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute `tokens`, which stand at positions
    [start, start + len(tokens)), with the KV of [0, start) already in `blocks`.

    `after` is set where the last of `tokens` was not read yet: it is what the step launched before
    this one samples at that place, counted over all samples of its rows in order; the number that
    stands in `tokens` means nothing then.

    Rows of two steps with the same `key` (0: none) are of one sequence that has kept its blocks in
    between: `blocks` begins with those it had."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[BlockId]
    samples: tuple[Sample, ...] = ()
    prompt: PromptAsk | None = None
    after: int | None = None
    key: int = 0


class Sampled(msgspec.Struct, frozen=True, gc=False):
    id: int
    logprobs: PositionLogprobs | None = None


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """One Sampled per sample of the row, in order; one PositionLogprobs per target of its ask."""

    samples: tuple[Sampled, ...] = ()
    prompt: tuple[PositionLogprobs, ...] = ()


class KVMemory(Protocol):
    """The pool as bytes. `read` and `write` copy one head shard of whole blocks in the order given:
    `[block][layer][K,V][head of the shard][token][dim]`, so a buffer holds `len(blocks) *
    layout.block_bytes / layout.kv_shards` bytes. `views` is the blocks' own bytes, a writable view
    each; None where they do not lie so (on a device, in head shards), or the engine has to know of
    writes. All are thread-safe for blocks that are held; what is read must not change meanwhile."""

    layout: KVLayout

    def read(self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0) -> None: ...

    def write(self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0) -> None: ...

    def views(self, blocks: Sequence[BlockId]) -> Sequence[memoryview] | None: ...


class Launched(Protocol):
    """A step that the runner was given."""

    def read(self) -> list[RowResult]:
        """Wait until the rows' KV is written, and give one result per row, in order. Called once,
        of several steps in the order of their launch."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A step that was computed when it was launched."""

    results: list[RowResult]

    def read(self) -> list[RowResult]:
        return self.results


class Runner(Protocol):
    """Computes steps: writes the rows' KV into the pool and samples where asked."""

    @property
    def memory(self) -> KVMemory: ...

    def launch(self, rows: Sequence[Row]) -> Launched:
        """Begin a step, at least one row. It runs behind the step launched before, of which at most
        one may be unread; what it is given of that step's tokens, `Row.after` says. The caller
        changes nothing that a row holds before it has read the step."""


# --- between engine and step loop -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for all that a request knows (see block_hashes), in order; the first `cached` of them
    hold KV already (of this node's prefix cache; the last `loaded` of these came from its host
    tier). Held until submit() or release()."""

    request: RequestId
    blocks: tuple[BlockId, ...]
    hashes: tuple[BlockHash, ...]  # of the full ones
    cached: int
    loaded: int = 0


class TokenOut(msgspec.Struct, frozen=True, gc=False):
    """One new token of one choice. `finish` "stop" covers EOS and stop ids (`stop_id` says which),
    and the end of a grammar (then `stop_id` is None); stop strings are found by the node's server.
    """

    request: RequestId
    choice: int
    offset: int  # index among the choice's outputs
    id: int
    logprobs: PositionLogprobs | None = None
    finish: Literal["stop", "length"] | None = None
    stop_id: int | None = None


@dataclass(frozen=True, slots=True)
class Complete:
    """A choice that came with all its tokens, the one that ends it included: nothing is run for it.
    `finish` and `stop_id` are those its last token would have had."""

    request: RequestId
    choice: int
    finish: Literal["stop", "length"]
    stop_id: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How many leading tokens of what a tracked request came with (see block_hashes) have KV, and
    where. The step loop may `hold` these blocks until the next call of step(), as those of Filled.
    """

    request: RequestId
    computed: int  # landed tokens that were come to are among them
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A full chunk of a choice, prompt or output: its name and where it is. In a StepResult: the
    step computed the rest of it; told once, and a prompt's by the choice that leads. The step loop
    may `hold` the blocks until the next call of step(), even if the request ended in this one."""

    request: RequestId
    choice: int
    index: int  # of the chunk in the choice's chain
    hash: BlockHash
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PromptUse:
    """Where a request's prompt KV came from; given once, when its prompt is computed. Tokens.
    `logprobs` of the prompt's tokens from the second on, if they were asked for."""

    request: RequestId
    prompt: int
    cached: int
    fetched: int
    computed: int
    host: int = 0  # from the host tier
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: tuple[TokenOut, ...] = ()
    progress: tuple[Progress, ...] = ()
    filled: tuple[Filled, ...] = ()
    prompts: tuple[PromptUse, ...] = ()
    complete: tuple[Complete, ...] = ()  # of requests that were submitted since the last step
    finished: tuple[RequestId, ...] = ()  # requests all of whose choices ended in this step
    num_tokens: int = 0  # tokens computed in this step, in vain or not; 0: nothing could run
    num_prompt_tokens: int = 0
    num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Chunk hashes that entered or left the prefix cache since the last call."""

    stored: tuple[BlockHash, ...] = ()
    evicted: tuple[BlockHash, ...] = ()


class Engine(Protocol):
    """A request is tokens known and KV computed; each step closes gaps under one token budget.

    With overlap a step is launched before the one before it is read, so that one may be under way
    between two calls of step(). What is told, cached and counted is what was read. What such a step
    computes for a choice that has ended meanwhile is dropped; blocks that it uses are free for
    others when it was read, whoever gave them back."""

    info: EngineInfo
    memory: KVMemory

    def block_hashes(self, request: Request) -> tuple[BlockHash, ...]:
        """Hashes of the full blocks of what the request knows: the prompt, and where n is 1 the
        outputs too (it was begun elsewhere)."""

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks are in this node's prefix cache now."""

    def reserve(self, request: Request) -> Reservation | None:
        """Take blocks for all that the request knows, or None (and no effect) if they are not free,
        or are owed to a waiting request. Raise as submit() does where it can never fit."""

    def release(self, reservation: Reservation) -> None: ...

    def submit(
        self,
        request: Request,
        *,
        reservation: Reservation | None = None,
        landed: Sequence[tuple[int, int]] = (),
        prefill_only: bool = False,
        track: bool = False,
        report_filled: bool = False,
        finished: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """Queue a request. `landed` are ascending runs [start, end) of the reservation's full
        blocks that hold verified KV now, beside the `cached` leading ones; the engine computes the
        holes and goes over each run when it comes to it. `prefill_only` ends every choice after its
        first new token. `track` asks for Progress, `report_filled` for Filled. Choices in
        `finished` are not run. `matcher` is at the beginning of the grammar that the parameters
        name: each choice has a copy, which takes the choice's outputs first; a choice ends where
        only EOS could follow. One that asks for prompt_logprobs computes all, whatever has landed.
        Raise PromptTooLong where it can never fit."""

    def full_chunks(self, request: RequestId) -> tuple[Filled, ...]:
        """All full chunks that a request holds now, each name once; () of an unknown id."""

    def finish_choice(self, request: RequestId, choice: int) -> None:
        """End one choice early (a stop string was found); unknown ids are ignored. It has no more
        tokens. If it was the last, the next step's `finished` names the request."""

    def abort(self, request: RequestId) -> None:
        """Forget a request and give its blocks back; unknown ids are ignored."""

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Reference blocks for a transfer, so that they are not reused."""

    def unhold(self, blocks: Sequence[BlockId]) -> None: ...

    def has_work(self) -> bool:
        """Whether there is anything to compute, to read or to report."""

    def step(self) -> StepResult:
        """Compute a step, or read the one that is under way, after launching the next where steps
        overlap. If the runner raises, nothing is lost: the step can be tried again."""

    def starved(self) -> bool:
        """True when in the last call of step() a request lost its blocks, or nothing could run, for
        want of blocks: parked ones should give theirs back, youngest first."""

    def cache_changes(self) -> CacheChange: ...

    def cached_chunks(self) -> tuple[BlockHash, ...]: ...

    def load(self) -> NodeLoad:
        """Counters and gauges of the engine's own; the node adds those of its transfers."""

    def check_integrity(self) -> None:
        """Raise with the numbers unless free + held == total and every reference is accounted."""

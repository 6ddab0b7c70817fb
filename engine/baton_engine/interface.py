"""The records and Protocols between an engine, its runner and the rest of a node; imports no torch.

    Runner        computes a step: `runner` on real weights, `sim` on a timing model
    KVMemory      the paged pool as bytes, for transfers
    StepResult    what a step of the engine (EngineCore, in `core`) did

One thread, the step loop, calls all methods of EngineCore. Transfer threads may use KVMemory on
blocks that the step loop holds for them.

A span is `layout.block_size` consecutive tokens of a sequence. Each group of layers has one block
for it (see KVLayout). A sequence's blocks are a flat list with all blocks of the first span first,
and 0 (padding) in place of blocks that the sequence does not hold because a window has left them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import msgspec

from baton_protocol.errors import BatonError
from baton_protocol.ids import BlockHash, BlockId, Fingerprint, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.pooling import Pooling, PoolingParams
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import MAX_LOGPROBS, FinishReason, SamplingParams
from baton_protocol.store import Exact

# What an engine gives back while it sleeps, by vLLM's names.
Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = get_args(Part)
# Where weights are meanwhile. 1: in host memory (on a CPU they are there, and stay). 2: nowhere;
# they are loaded again from the model's folder.
SleepLevel = Literal[1, 2]
LEVELS: tuple[SleepLevel, ...] = get_args(SleepLevel)
# What an engine does that should sleep while requests run.
SleepMode = Literal["refuse", "abort"]
MODES: tuple[SleepMode, ...] = get_args(SleepMode)
# What becomes of the requests of LLM, LLMEngine and AsyncLLM at a sleep, by vLLM's names.
PauseMode = Literal["abort", "wait"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
# In place of a block that a sequence does not hold.
PADDING = BlockId(0)
# Changes the logits of one position, float32 [V], in place or not, and returns them. `prompt` and
# `outputs` are the ids before the position.
ChangeLogits = Callable[[Any, Sequence[int], Sequence[int]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties of one engine that never change. Lengths are in tokens. `weights` is their dtype,
    or how they are quantized, as a user names it; "" without weights. `vector_size` is the most
    numbers of a vector that a model of `pooling` answers with. With `whole_prompts` a prompt is
    computed in one step, and never from KV of another: the model is an encoder."""

    kind: Literal["torch", "sim"]
    model: str
    fingerprint: Fingerprint
    layout: KVLayout
    num_blocks: int  # without block 0 (padding)
    max_model_len: int
    max_batched_tokens: int
    max_num_seqs: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    exact: Exact = "numeric"
    weights: str = ""
    max_logprobs: int = MAX_LOGPROBS
    pooling: Pooling = ""
    vector_size: int = 0
    whole_prompts: bool = False


# --- between scheduler and runner -----------------------------------------------------------
# A step creates a thousand of these and of TokenOut. msgspec structs are created in a third of the
# time of dataclasses, and with gc=False the garbage collector does not traverse them.


@dataclass(frozen=True, slots=True)
class PenaltyCounts:
    """Input of the penalties: the prompt's distinct ids, and the count of each generated id. The
    engine updates it, the runner reads it during a step. It depends only on the tokens."""

    prompt: Sequence[int]
    outputs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ListedIds:
    """The ids of a request's logit_bias and allowed_token_ids, as arrays. Made once per request, so
    a runner uses them in each step without a conversion."""

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
    """The state of a grammar for one choice (see `baton_text.grammars`). It depends only on the
    choice's tokens."""

    def copy(self) -> Matcher: ...

    def accept(self, ids: Sequence[int]) -> bool:
        """Advance by these tokens. After a return value of False, the matcher has `stopped`."""

    @property
    def stopped(self) -> bool:
        """True if only EOS may follow, or nothing at all (see `error`)."""

    @property
    def complete(self) -> bool:
        """True if the text matches the grammar, so the choice may end here."""

    @property
    def error(self) -> str:
        """Why the matcher cannot continue although the text is not complete; "" if there is no
        error. Some dead ends show only in a mask that permits nothing but EOS."""

    def forced(self) -> Sequence[int]:
        """The next tokens as far as the grammar allows one text only; often none."""

    def mask(self) -> bytes:
        """One bit per id, least significant first: 1 if the id may follow."""


class LogitsProcessor(Protocol):
    """A logits processor of another package, made once per engine by a call with the size of the
    vocabulary (see `config.request_processors`).

    It changes only logits of requests whose extra_args it uses. What it changes may depend on these
    and on the request's own tokens, and on nothing else: then a token is the same in any batch, and
    on the node that takes a request over. Equal arguments must give equal bits. It gets the logits
    after all changes of Baton's own parameters, and before temperature and filters.
    """

    def change_for(self, args: Mapping[str, Any]) -> ChangeLogits | None:
        """What it changes for a request with these extra_args; None if it does not use them. Raises
        ValueError, with a text for the client, for values that it cannot use."""


@dataclass(frozen=True, slots=True)
class OwnChanges:
    """Changes of logits processors at one position, and the ids before it."""

    changes: tuple[ChangeLogits, ...]
    prompt: Sequence[int]
    outputs: Sequence[int]


class Sample(msgspec.Struct, frozen=True, gc=False):
    """Ask for one token after one of the row's tokens.

    `position` is the new token's index in prompt + output, so the row has the token before it; with
    (seed, choice) it is the key of the noise. `banned` ids get no probability (EOS and stop ids
    before min_tokens, last ids of bad words). `penalty_counts` is set if the parameters have a
    penalty. Without `listed`, the runner reads the ids from the parameters. With a `matcher`, only
    ids in its mask are sampled; the runner gets the mask when it samples, while the device
    computes. `own` are changes of other packages' logits processors.
    """

    choice: int
    position: int
    params: SamplingParams
    banned: tuple[int, ...] = ()
    penalty_counts: PenaltyCounts | None = None
    listed: ListedIds | None = None
    matcher: Matcher | None = None
    own: OwnChanges | None = None


class PromptAsk(msgspec.Struct, frozen=True, gc=False):
    """Ask for logprobs of the prompt. `targets[i]` is the token after the row's token i (the
    prompt's last token has none). Each target also gets the `top` most likely tokens."""

    targets: tuple[int, ...]
    top: int


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute `tokens` at positions [start, start + len(tokens)).
    The KV of [0, start) is already in `blocks`, a flat list that holds a block for each token that
    is computed or seen.

    `awaited_sample` is set if the last of `tokens` has not been read yet. It is then an index into
    the samples of the previously launched step, counted over all its rows in order, and the last
    number in `tokens` is a placeholder.

    Rows of two steps with the same `blocks_id` (0: none) belong to one sequence that kept its
    blocks in between, so `blocks` begins with the blocks of the earlier row, or with 0 in place of
    some that a window has left. The engine changes the list when it has read an earlier step.

    `speculates` is True if the sequence may get drafts in later steps. `pooling` asks for the
    vector of the last of `tokens`.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[BlockId]
    samples: tuple[Sample, ...] = ()
    prompt: PromptAsk | None = None
    awaited_sample: int | None = None
    blocks_id: int = 0
    speculates: bool = False
    pooling: PoolingParams | None = None


class Sampled(msgspec.Struct, frozen=True, gc=False):
    id: int
    logprobs: PositionLogprobs | None = None


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """One Sampled per sample of the row, in order, and one PositionLogprobs per target of its
    PromptAsk. `vector` is what its PoolingParams ask for (see `baton_engine.vectors`)."""

    samples: tuple[Sampled, ...] = ()
    prompt: tuple[PositionLogprobs, ...] = ()
    vector: bytes = b""


class StoredMemory(Protocol):
    """The pool as bytes: its own, or with a codec those of `layout.stored`, as the store has them.

    `read` and `write` copy one head shard of whole blocks, in the order given:
    `[block][layer][field][head of the shard][token][number]`. A buffer has
    `len(blocks) / layout.kv_shards` times the bytes of a block. The blocks belong to `group`, or to
    groups whose layers keep the same fields (see KVLayout.divisions).

    `views` returns one writable view of each block's own bytes. It returns None if there are none
    (blocks on a device, several head shards, or a codec) or if the engine has to notice writes.

    These three are thread-safe for blocks that are held. Blocks must not be written during a read.
    """

    layout: KVLayout

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None: ...

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None: ...

    def views(self, blocks: Sequence[BlockId]) -> Sequence[memoryview] | None: ...


class KVMemory(StoredMemory, Protocol):
    """The pool's own bytes. The engine calls `copy` between two steps: it copies whole blocks
    before the next step reads them."""

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None: ...


class Launched(Protocol):
    """A launched step."""

    def read(self) -> list[RowResult]:
        """Wait until the rows' KV is written, and return one result per row, in order. Call it once
        per step, in the order of the launches."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose results were computed at launch."""

    results: list[RowResult]

    def read(self) -> list[RowResult]:
        return self.results


class Runner(Protocol):
    """Computes steps: writes the rows' KV to the pool and samples as the rows ask."""

    @property
    def memory(self) -> KVMemory: ...

    def launch(self, rows: Sequence[Row]) -> Launched:
        """Start a step of at least one row. It runs after the previously launched step, which may
        be unread; at most one step may be. `Row.awaited_sample` refers to that step's samples. The
        caller must not change anything that a row refers to until it has read the step. Raises
        OutOfMemory if the device lacks memory for the step; a smaller one may fit."""


# --- between engine and step loop -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for all known tokens of a request (see EngineCore.block_hashes), as a flat list. They
    are held until submit() or release().

    The first `cached` spans already have KV from this node's prefix cache, in groups with a window
    as far as the next token sees them. The last `loaded` of these begin with a span that came from
    its host tier.
    """

    request: RequestId
    blocks: tuple[BlockId, ...]
    hashes: tuple[BlockHash, ...]  # hashes of the full spans
    cached: int
    loaded: int = 0


class TokenOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One new token of one choice.

    `finish` is "stop" for EOS and stop ids (`stop_id` is the id) and for the end of a grammar
    (`stop_id` is None). The node's server finds stop strings.
    """

    request: RequestId
    attempt: int
    choice: int
    offset: int  # index among the choice's outputs
    id: int
    logprobs: PositionLogprobs | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None


class Drafts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step found out about the drafts of one sequence: `drafted` were computed, and the
    first `accepted` were the next tokens. `forced`: the sequence's grammar allowed no others."""

    request: RequestId
    attempt: int
    drafted: int
    accepted: int
    forced: bool = False


class Complete(msgspec.Struct, frozen=True, array_like=True):
    """A choice that ends without a new token. It was submitted with all its tokens, including the
    one that ends it: then the engine computes nothing for it, and `finish` and `stop_id` are those
    of its last token. Or its request is a pooling request, and `vector` is the answer."""

    request: RequestId
    attempt: int
    choice: int
    offset: int  # number of its tokens
    finish: FinishReason
    stop_id: int | None = None
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class Progress:
    """How many of the tokens that a tracked request came with (see EngineCore.block_hashes) have
    KV, and their blocks, as a flat list. The step loop may `hold` these blocks until the next call
    of step()."""

    request: RequestId
    computed: int  # number of leading tokens with KV, including landed ones
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A full chunk of a choice's prompt or outputs: its hash and its blocks, in the order of
    KVLayout.chunk_of. If one of them is 0, the chunk has no whole KV in the groups with a window.

    In a StepResult, it is a chunk that the step completed. Each is reported once, and chunks of the
    prompt only for the leader. The step loop may `hold` the blocks until the next call of step(),
    even if the request ended in this step.
    """

    request: RequestId
    choice: int
    index: int  # index of the chunk among the choice's chunks
    hash: BlockHash
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PromptUse:
    """The sources of a request's prompt KV, in tokens. Reported once, when the prompt is computed.
    `logprobs` are those of the prompt's tokens from the second on, if the request asked for
    them."""

    request: RequestId
    prompt: int
    cached: int
    fetched: int
    computed: int
    host: int = 0  # loaded from the host tier
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ended without its last token: the device lacks memory even for a step of this
    request alone, or a choice's grammar allows no further token (GrammarDeadEnd)."""

    request: RequestId
    error: BatonError


@dataclass(slots=True)
class StepResult:
    """What happened since the last step: the engine fills it, and then gives it away."""

    tokens: list[TokenOut] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    started: list[RequestId] = field(default_factory=list)  # first computed in this step
    prompts: list[PromptUse] = field(default_factory=list)
    complete: list[Complete] = field(default_factory=list)  # choices that end without a token
    finished: list[RequestId] = field(default_factory=list)  # requests that ended, failed ones too
    failed: list[Failed] = field(default_factory=list)
    num_tokens: int = 0  # computed tokens, including those that were dropped; 0: nothing was read
    num_prompt_tokens: int = 0  # computed tokens that belong to prompts
    num_seqs: int = 0  # sequences in the step
    drafts: list[Drafts] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        return sum(each.drafted for each in self.drafts)

    @property
    def accepted(self) -> int:
        return sum(each.accepted for each in self.drafts)

    def drop_request(self, request: RequestId) -> None:
        """Leave out how an earlier attempt of this request ended."""
        self.finished = [id for id in self.finished if id != request]
        self.complete = [choice for choice in self.complete if choice.request != request]
        self.failed = [failure for failure in self.failed if failure.request != request]


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Chunk hashes that entered or left the prefix cache since the last call."""

    stored: tuple[BlockHash, ...] = ()
    evicted: tuple[BlockHash, ...] = ()

"""One choice of one request, as the scheduler sees it: tokens known, KV computed, blocks held.

In: a Request and the tokens sampled for it. Out: what is missing. Nothing here knows the pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from baton_engine.api import Listed, PromptUse, Seen
from baton_engine.outcome import Bans
from baton_engine.runs import Run, total, within
from baton_protocol.hashing import extend_hashes
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import SamplingParams


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of `tokens` tokens."""
    return -(-tokens // block_size)


def given_ids(request: Request) -> tuple[int, ...]:
    """What every choice of a request knows when it arrives: the prompt, and the outputs too where
    there is one choice."""
    if request.params.n == 1 and request.outputs:
        return request.prompt_ids + request.outputs[0]
    return request.prompt_ids


class Sequence:
    """Tokens [0, computed) have KV in `blocks`; tokens [computed, known) are to be computed, but
    for the runs of tokens `ahead`, which have landed already.

    The first `registered` blocks are in the prefix cache, or shared from it, and so are those of
    the runs. Of the choice's chunks the first `passed` have been computed or come to. `key` orders
    sequences by age: (arrival of the request, choice). `seen` is there where the parameters hold a
    penalty.
    """

    __slots__ = (
        "_counts",
        "ahead",
        "blocks",
        "choice",
        "computed",
        "hashes",
        "key",
        "passed",
        "registered",
        "running",
        "seen",
        "state",
        "tokens",
    )

    def __init__(self, state: RequestState, choice: int) -> None:
        self.state = state
        self.choice = choice
        self.key = (state.arrival, choice)
        self.tokens: list[int] = [*state.request.prompt_ids, *state.outputs_of(choice)]
        self.hashes: list[BlockHash] = list(state.given_hashes)
        self.blocks: list[BlockId] = []
        self.computed = 0
        self.ahead: list[Run] = []
        self.registered = 0
        self.passed = 0
        self.running = False
        self._counts: dict[int, int] = {}
        self.seen: Seen | None = None
        if state.params.penalized:
            self.seen = Seen(state.distinct_prompt, self._counts)
            for id in state.outputs_of(choice):
                self._count(id)

    def append(self, id: int) -> None:
        """The choice has a new token."""
        self.tokens.append(id)
        if self.seen is not None:
            self._count(id)

    def _count(self, id: int) -> None:
        self._counts[id] = self._counts.get(id, 0) + 1

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens known behind the computed ones; at least 1 while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def due(self) -> int:
        """Tokens to compute before the next run, or at all; at least 1 while the sequence lives."""
        return (self.ahead[0][0] if self.ahead else len(self.tokens)) - self.computed

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.state.prompt_len

    @property
    def prompt_missing(self) -> int:
        """Prompt tokens that are to be computed."""
        prompt = self.state.prompt_len
        return max(0, prompt - self.computed) - total(within(self.ahead, 0, prompt))

    def hashes_of(self, blocks: int) -> Seq[BlockHash]:
        """Hashes of the first `blocks` blocks, all full; made when first asked for."""
        have, size = len(self.hashes), self.state.block_size
        if have < blocks:
            parent = self.hashes[-1] if self.hashes else self.state.root
            fresh = self.tokens[have * size : blocks * size]
            self.hashes.extend(extend_hashes(parent, fresh, size))
        return self.hashes[:blocks]

    def place(self, blocks: list[BlockId], runs: Seq[Run] = ()) -> None:
        """Give the sequence blocks, in which the tokens of `runs` have KV, all of whose whole
        blocks are registered. A run begins where a block begins."""
        self.blocks, self.computed, self.ahead = blocks, 0, list(runs)
        self.advance(0)
        self.registered = self.computed // self.state.block_size
        assert self.due > 0, "at least one token must be left to compute"

    def advance(self, count: int) -> None:
        """`count` tokens more are computed; a run that is reached is gone over."""
        self.computed += count
        if self.ahead and self.ahead[0][0] == self.computed:
            self.computed = self.ahead.pop(0)[1]

    def clear(self) -> list[BlockId]:
        """Forget all KV (tokens stay) and return the blocks that held it."""
        blocks, self.blocks, self.computed, self.registered = self.blocks, [], 0, 0
        self.ahead = []
        return blocks


class RequestState:
    """What the choices of one request share; `given_hashes` name the full blocks of `given_ids`.

    Choice 0 (or the first that runs) leads: it computes the prompt. The others are `pending` until
    then, and find the prompt's full blocks in the prefix cache.
    """

    def __init__(
        self,
        request: Request,
        *,
        arrival: int,
        root: BlockHash,
        given_hashes: Seq[BlockHash],
        block_size: int,
        prefill_only: bool,
        track: bool,
        report_filled: bool = False,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.root = root
        self.given_hashes = given_hashes
        self.block_size = block_size
        self.prefill_only = prefill_only
        self.track = track
        self.report_filled = report_filled
        self.keeps_blocks = track or report_filled  # for one step after it has ended
        self.prompt_len = len(request.prompt_ids)
        self.given_len = len(given_ids(request))
        self.pending: list[int] = []
        self.live: dict[int, Sequence] = {}
        self.leader: Sequence | None = None
        self.prompt_done = False
        self.given_done = False  # tracked until all that was given had KV
        self.bans = Bans(request.params)
        self.listed = Listed.of(request.params)
        # An array, so that a runner takes it as it is in each step.
        self.distinct_prompt = array("q")
        if request.params.penalized:
            self.distinct_prompt.extend(sorted(set(request.prompt_ids)))
        # Of the prompt's tokens from the second on, as far as the leader has come.
        self._prompt_logprobs: list[PositionLogprobs] = []
        # Where leading tokens and runs came from, beside those that were computed: this node's
        # cache, its host tier, the store. None until the leader is first placed.
        self._sources: list[list[Run]] | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def ended(self) -> bool:
        return not self.pending and not self.live

    @property
    def asks_prompt(self) -> bool:
        """Whether the leader must compute each token of the prompt itself: nothing cached or
        fetched tells how likely a token was. The other choices come after that, and may share."""
        return self.params.prompt_logprobs is not None and not self.prompt_done

    def take_prompt_logprobs(self, start: int, found: Seq[PositionLogprobs]) -> None:
        """What the piece from `start` on told. A leader that was preempted tells it again."""
        self._prompt_logprobs[start:] = found

    def outputs_of(self, choice: int) -> tuple[int, ...]:
        """Ids the choice had when the request arrived."""
        outputs = self.request.outputs
        return outputs[choice] if outputs else ()

    def choices_with(self, sequence: Sequence) -> list[int]:
        """Choices whose next token is sampled from the last row of `sequence`: with the leader at
        the prompt's end, all that have no token yet. (A leader has none itself if any has none.)"""
        choices = [sequence.choice]
        if sequence is self.leader and not self.prompt_done:
            choices += [choice for choice in self.pending if not self.outputs_of(choice)]
        return choices

    def placed(
        self,
        sequence: Sequence,
        *,
        cached: Seq[Run] = (),
        host: Seq[Run] = (),
        fetched: Seq[Run] = (),
    ) -> None:
        """Note where the leader's first KV came from. After a preemption only what is lost counts:
        tokens that this request itself computed do not become cached ones."""
        if sequence is not self.leader or self.prompt_done:
            return
        sources, kept = self._sources, sequence.computed
        if sources is None:
            sources, kept = [list(cached), list(host), list(fetched)], self.prompt_len
        self._sources = [within(runs, 0, min(kept, self.prompt_len)) for runs in sources]

    def prompt_use(self) -> PromptUse:
        """Given once: what the prompt told is handed over, and kept here no longer."""
        told, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        cached, host, fetched = map(total, self._sources or ((), (), ()))
        return PromptUse(
            request=self.request.id,
            prompt=self.prompt_len,
            cached=cached,
            host=host,
            fetched=fetched,
            computed=self.prompt_len - cached - host - fetched,
            logprobs=told,
        )

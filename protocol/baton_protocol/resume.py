"""Records of a stream that another router can continue: how it began, and each delta since.

The events of a stream are a function of its call and of the deltas in their order. So a router that
has both writes the same events again, byte for byte, and its next attempt starts after the tokens
in the deltas. If the nodes compute the same tokens again, the last of the deltas may be missing:
the next attempt makes them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from baton_protocol.errors import ErrorRecord
from baton_protocol.figures import Count, Text, TokenId
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import MAX_CHOICES, FinishReason, SamplingParams
from baton_protocol.store import Kind

# Of digest_after(), by FNV-1a's prime; 30 bits, since Python is faster with one digit of an int.
NO_TOKENS = 0x011C9DC5  # the digest of no tokens
_PRIME, _BITS = 0x01000193, 0x3FFFFFFF


class ResumeHead(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream began. `route` and `body` are those of the client's call, `model` the name it
    answers under, `created` its time in Unix seconds. `request` has the seed and no outputs; its id
    names the stream, and nodes of `kind` can run it. The stream outlives its client by `seconds`.
    `most_cached` is how many tokens of the prompt its first node did not have to compute, as
    predicted; None if it had no node yet. If the stream is `repeatable`, nodes of `kind` compute
    the same tokens again, to the bit, and each as a delta of its own: the client may have events
    whose deltas are not kept."""

    route: Text
    body: bytes
    model: Text
    kind: Kind
    created: Count
    seconds: Count
    request: Request
    most_cached: int | None = None
    repeatable: bool = False

    def with_request(self, request: Request) -> ResumeHead:
        """This head with what nodes are sent now. Salt and trace are the router's own."""
        kept = msgspec.structs.replace(request, id=self.request.id, salt="", traceparent="")
        return msgspec.structs.replace(self, request=kept)


class KeptDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a Delta adds to its choice; its offset follows from the deltas before it."""

    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
    ids: tuple[TokenId, ...]
    text: str = ""
    finish: FinishReason | None = None
    stop: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class ResumeEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next deltas of a stream: first those of choice 0 that have only ids and text, in two
    columns, since a record of each takes four times as long; then `deltas`. `cached` is the number
    of the prompt's tokens that no node had to compute, once it is known. `error` ended the
    stream."""

    ids: tuple[tuple[TokenId, ...], ...] = ()
    texts: tuple[str, ...] = ()
    deltas: tuple[KeptDelta, ...] = ()
    cached: int | None = None
    error: ErrorRecord | None = None

    @classmethod
    def of(cls, deltas: Sequence[Delta], *, plain: bool, cached: int | None) -> ResumeEntry:
        """An entry of at least one delta. In a `plain` stream, only a choice's last delta has more
        than ids and text, and the only choice is 0."""
        rest: Sequence[Delta] = deltas
        if plain:
            rest = deltas[-1:] if deltas[-1].finish is not None else ()
        columns = deltas[: len(deltas) - len(rest)]
        return cls(
            tuple([delta.ids for delta in columns]),
            tuple([delta.text for delta in columns]),
            tuple([_kept_delta(delta) for delta in rest]),
            cached,
        )

    def all_deltas(self) -> list[KeptDelta]:
        """Raise ValueError if the columns differ in length."""
        columns = zip(self.ids, self.texts, strict=True)
        return [*(KeptDelta(0, ids, text) for ids, text in columns), *self.deltas]


@dataclass(slots=True)
class ResumeState:
    """What the entries of a stream amount to. `outputs` holds the ids of each choice, `deltas` all
    that are kept, in order. `most_cached` is the head's. `begun`: a client may have events, perhaps
    of deltas that are not kept."""

    outputs: list[list[int]]
    finished: set[int] = field(default_factory=set)
    deltas: list[Delta] = field(default_factory=list)
    cached: int | None = None
    most_cached: int | None = None
    has_prompt_logprobs: bool = False
    begun: bool = False
    error: ErrorRecord | None = None

    @classmethod
    def of(
        cls, head: ResumeHead, entries: Sequence[ResumeEntry], *, begun: bool = False
    ) -> ResumeState:
        """Raise ValueError for entries that are not of this stream."""
        state = cls(
            [[] for _ in range(head.request.params.n)],
            most_cached=head.most_cached,
            begun=begun or bool(entries),
        )
        for entry in entries:
            for kept in entry.all_deltas():
                state._add(head.request, kept)
            state.cached = entry.cached if entry.cached is not None else state.cached
            state.error = state.error or entry.error
        return state

    @property
    def over(self) -> bool:
        """Whether no token follows."""
        return self.error is not None or len(self.finished) == len(self.outputs)

    def _add(self, request: Request, kept: KeptDelta) -> None:
        if kept.choice >= len(self.outputs) or kept.choice in self.finished:
            raise ValueError(f"a delta of choice {kept.choice}, which is not open")
        ids = self.outputs[kept.choice]
        delta = Delta(
            request=request.id,
            attempt=1,
            choice=kept.choice,
            offset=len(ids),
            ids=kept.ids,
            text=kept.text,
            logprobs=kept.logprobs,
            finish=kept.finish,
            stop=kept.stop,
            prompt_logprobs=kept.prompt_logprobs,
        )
        ids.extend(kept.ids)
        self.deltas.append(delta)
        if kept.finish is not None:
            self.finished.add(kept.choice)
        if kept.prompt_logprobs:
            self.has_prompt_logprobs = True


def may_repeat(params: SamplingParams) -> bool:
    """Whether exact nodes make the same deltas of a request again, in the same order. Choices take
    turns as they like, and arguments for logits processors of other packages may mean anything."""
    return params.n == 1 and params.prompt_logprobs is None and params.extra_args is None


def is_plain(params: SamplingParams) -> bool:
    """Whether the deltas of a request fit the columns of a ResumeEntry, but for the last one."""
    return params.n == 1 and params.logprobs is None and params.prompt_logprobs is None


def digest_after(digest: int, ids: Sequence[int]) -> int:
    """The digest of the tokens so far and then these. Tokens that differ in one place never have
    the same."""
    for id in ids:
        digest = (digest ^ id) * _PRIME & _BITS
    return digest


def _kept_delta(delta: Delta) -> KeptDelta:
    return KeptDelta(
        delta.choice,
        delta.ids,
        delta.text,
        delta.finish,
        delta.stop,
        delta.logprobs,
        delta.prompt_logprobs,
    )

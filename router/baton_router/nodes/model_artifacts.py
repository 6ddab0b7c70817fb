"""Tokenizer and chat template of a pool, fetched from its nodes by digest: routers mount no model.

In: a node's report, which names the SHA-256 digests of its artifacts. Out: a PoolModel, built once
per set of digests. Each file is checked against its digest before use.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from baton_protocol.link import ARTIFACTS_PATH
from baton_protocol.store import Kind, NodeReport
from baton_router.nodes.model_grammars import (
    AnswerRules,
    GrammarCounts,
    ModelGrammars,
    Value,
)
from baton_router.settings import Tunables
from baton_text.chat import ChatTemplate
from baton_text.defaults import generation_defaults
from baton_text.grammars.constraints import Kind as GrammarKind
from baton_text.parsers.parser import ReasoningParser, ToolParser
from baton_text.parsers.registry import parsers_of
from baton_text.tokenizer import LONG_TEXT, Tokenizer

T = TypeVar("T")
FETCH_TIMEOUT_S = 30.0
# Seconds without data: other nodes wait for the same model, so a frozen node must not hold them up.
SILENCE_S = 3.0
PIECE_BYTES = 1 << 16
# How many models without nodes are kept in case nodes come back: those used last.
KEPT_UNUSED = 4


class FetchError(Exception):
    """A node did not serve a file that its report names; the message says which file."""


class TooLargeError(FetchError):
    """A node's files exceed the router's limit."""


@dataclass(frozen=True, slots=True)
class PoolModel:
    """A model as the router needs it. `defaults` are the sampling defaults in its
    generation_config. The parsers read its tool calls and reasoning; None if it has none or their
    format is unknown."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: dict[str, Any]
    tool_parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    grammars: ModelGrammars = field(default_factory=ModelGrammars)

    async def grammar(self, kind: GrammarKind, value: Value) -> str:
        """See ModelGrammars.text."""
        return await self.grammars.text(self.tokenizer, kind, value)

    async def answer_grammar(self, rules: AnswerRules) -> str:
        """See ModelGrammars.answer."""
        return await self.grammars.answer(self.tokenizer, rules)

    async def encode(
        self, text: str, max_tokens: int, *, add_special_tokens: bool
    ) -> tuple[list[int], bool]:
        """See Tokenizer.encode_up_to."""
        return await _encode_off_loop(
            self.tokenizer.encode_up_to, text, max_tokens, add_special_tokens
        )

    async def encode_last(
        self, text: str, max_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        """See Tokenizer.encode_last."""
        return await _encode_off_loop(
            self.tokenizer.encode_last, text, max_tokens, add_special_tokens
        )


async def _encode_off_loop(
    encode: Callable[[str, int, bool], T], text: str, max_tokens: int, special: bool
) -> T:
    """Encode a long text in a thread. A short one takes a few milliseconds of the event loop."""
    if len(text) <= LONG_TEXT:
        return encode(text, max_tokens, special)
    return await asyncio.to_thread(encode, text, max_tokens, special)


Key = tuple[tuple[str, str], ...]


class ModelStore:
    """PoolModels by the digests of their files, in order of last use. Concurrent callers share one
    build. The files of one node may have at most `max_bytes` together."""

    def __init__(
        self, session: aiohttp.ClientSession, max_bytes: int = Tunables().max_artifact_bytes
    ) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._models: OrderedDict[Key, asyncio.Task[PoolModel]] = OrderedDict()
        self._forgotten_counts = GrammarCounts()  # counts of forgotten models

    async def get(self, report: NodeReport, address: str) -> PoolModel:
        """The model of a report, fetched from the node at `address`. Raise FetchError,
        aiohttp.ClientError or TimeoutError; a later call tries again."""
        key = _key(report)
        task = self._models.get(key)
        if task is None:
            task = asyncio.create_task(self._build(report, address))
            self._models[key] = task
        self._models.move_to_end(key)
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._models.get(key) is task:
                del self._models[key]
            raise

    def ready(self, report: NodeReport) -> PoolModel | None:
        """The model, if it has been built."""
        task = self._models.get(_key(report))
        return _built(task) if task is not None else None

    @property
    def grammar_counts(self) -> GrammarCounts:
        """Counts of all models since the start of the process."""
        return _with_counts(self._forgotten_counts, *map(_built, self._models.values()))

    def forget_unused(self, used: Iterable[NodeReport]) -> None:
        """Keep the models of these nodes and KEPT_UNUSED others."""
        keys = {_key(report) for report in used}
        unused = [key for key in self._models if key not in keys]
        for key in unused[: max(0, len(unused) - KEPT_UNUSED)]:
            task = self._models.pop(key)
            self._forgotten_counts = _with_counts(self._forgotten_counts, _built(task))
            task.cancel()

    async def close(self) -> None:
        for task in self._models.values():
            task.cancel()
        await asyncio.gather(*self._models.values(), return_exceptions=True)
        self._models.clear()

    async def _build(self, report: NodeReport, address: str) -> PoolModel:
        names, files, total_bytes = sorted(report.artifacts), [], 0
        for name in names:
            files.append(await self._fetch(report, address, name, self._max_bytes - total_bytes))
            total_bytes += len(files[-1])
        return await asyncio.to_thread(_assemble, dict(zip(names, files, strict=True)))

    async def _fetch(self, report: NodeReport, address: str, name: str, max_bytes: int) -> bytes:
        """Fetch one file of at most `room` bytes."""
        digest = report.artifacts[name]
        url = f"{address}{ARTIFACTS_PATH}{digest}"
        timeout = aiohttp.ClientTimeout(
            total=FETCH_TIMEOUT_S, sock_connect=SILENCE_S, sock_read=SILENCE_S
        )
        # No redirects and no compression: the size limit below counts the bytes received.
        async with self._session.get(
            url,
            timeout=timeout,
            allow_redirects=False,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as response:
            if response.status != 200:
                raise FetchError(f"{name} of {report.node}: {url} answered {response.status}")
            data = bytearray()
            async for chunk in response.content.iter_chunked(PIECE_BYTES):
                data += chunk
                if len(data) > max_bytes:
                    raise TooLargeError(
                        f"the files of {report.node}, including {name}, exceed "
                        f"{self._max_bytes} bytes in total"
                    )
        if hashlib.sha256(data).hexdigest() != digest:
            raise FetchError(f"{name} of {report.node} does not match its digest {digest}")
        return bytes(data)


def _built(task: asyncio.Task[PoolModel]) -> PoolModel | None:
    built = task.done() and not task.cancelled() and task.exception() is None
    return task.result() if built else None


def _with_counts(counts: GrammarCounts, *models: PoolModel | None) -> GrammarCounts:
    for model in models:
        if model is not None:
            counts = counts.plus(model.grammars.counts)
    return counts


def _key(report: NodeReport) -> Key:
    return tuple(sorted(report.artifacts.items()))


def _assemble(artifacts: dict[str, bytes]) -> PoolModel:
    template = ChatTemplate.from_artifacts(artifacts)
    tool_parser, reasoning_parser = parsers_of(artifacts, template.source)
    return PoolModel(
        tokenizer=Tokenizer.from_artifacts(artifacts),
        template=template,
        defaults=generation_defaults(artifacts),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )


@dataclass(frozen=True, slots=True)
class Serving:
    """One kind that the pool serves: a model, its limits, and one of its nodes.

    `weight` is its share of new requests. It answers under `name`, one of its `names`. `made` is
    when its model files were written, in Unix seconds; 0 if no node reports it."""

    kind: Kind
    model: PoolModel
    names: tuple[str, ...]
    name: str
    max_model_len: int
    vocab_size: int
    sample: NodeReport
    weight: int
    made: int = 0

"""Streams of each dialect whose node dies: their events are those of an undisturbed stream, except
where the text is cut into deltas. Each dialect's own client reads them. Streams whose router dies,
perhaps with a node, are those of an undisturbed stream to the byte.

The streams of a round run at once. Each node of a role is killed at a random moment of its work, so
each stream loses its node at a position of its own.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import anthropic
import httpx2
import openai
import pytest

from baton_protocol.ids import RequestId
from baton_protocol.link import Deltas, PrefillDone, PrefillJob
from tests.faults.conftest import SHORT_DRAIN, SLOW_DECODE
from tests.router.server.test_killed_routers import Stream, check_kill, until_all_ready
from tests.support.clients.http import Json
from tests.support.clients.stream_events import plain_events, plain_stream
from tests.support.faults.tool_runs import BUDGET, SILENT, TOKENIZER, write_model
from tests.support.pools.leaks import settle
from tests.support.pools.processes import SIM, Cluster, Node
from tests.support.wires.wire import Passing
from tests.support.wires.witness import Trap

pytestmark = pytest.mark.integration

LIMIT_S = 120.0
TOKENS = 60  # of an answer that is only text
AT_ONCE = 24
SPREAD_S = 0.1  # between the first and the last stream of a round
LATEST = 40  # tokens per stream, at which a decode node is killed
RUNS = 100  # streams per dialect that lose their node
ROUNDS, FEW_ROUNDS = 40, 8

Part = tuple[int, str, Any]  # of an event: choice, kind, value
Role = Literal["prefill", "decode"]


# --- events ---------------------------------------------------------------------------------------


def openai_parts(event: Json) -> Iterator[Part]:
    for choice in event["choices"]:
        at, delta = choice["index"], choice.get("delta", choice)
        if "role" in delta:
            yield at, "begin", delta["role"]
        for name in ("reasoning", "content", "text"):
            if delta.get(name):
                yield at, name, delta[name]
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                yield at, "call", call["function"]["name"]
            yield at, f"arguments of {call['index']}", call["function"]["arguments"]
        if choice.get("token_ids"):
            scores = choice["logprobs"]["content"]
            for token in zip(choice["token_ids"], scores, strict=True):
                yield at, "token", token
        if choice["finish_reason"] is not None:
            yield at, "finish", (choice["finish_reason"], choice.get("stop_reason"))
    if event.get("usage"):
        yield -1, "usage", event["usage"]


def response_parts(event: Json) -> Iterator[Part]:
    kind = event["type"]
    if kind.endswith(".delta"):
        yield 0, f"{kind} of {event['item_id']}", event["delta"]
    else:
        yield 0, kind, {name: event[name] for name in event if name != "sequence_number"}


def message_parts(event: Json) -> Iterator[Part]:
    if event["type"] == "content_block_delta":
        delta = event["delta"]
        [text] = [delta[name] for name in delta if name != "type"]
        yield 0, f"{delta['type']} of {event['index']}", text
    elif event["type"] != "ping":
        yield 0, event["type"], event


def joined(parts: Iterator[Part]) -> dict[int, list[tuple[str, Any]]]:
    """The parts of each choice, in order, with the texts of deltas joined."""
    choices: dict[int, list[tuple[str, Any]]] = {}
    for at, kind, value in parts:
        found = choices.setdefault(at, [])
        if found and found[-1][0] == kind and isinstance(value, str):
            found[-1] = kind, found[-1][1] + value
        else:
            found.append((kind, value))
    return choices


# --- what clients read ----------------------------------------------------------------------------


def sends(data: bytes) -> httpx2.Client:
    """An HTTP client whose server answers with this stream."""
    answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    return httpx2.Client(transport=httpx2.MockTransport(lambda _: answer))


def openai_client(data: bytes) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://pool/v1", api_key="none", http_client=sends(data))


def read_completion(data: bytes) -> Any:
    texts: dict[int, str] = {}
    with openai_client(data) as api:
        for chunk in api.completions.create(model="sim", prompt="", stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def read_chat(data: bytes) -> Any:
    with openai_client(data) as api, api.chat.completions.stream(model="sim", messages=[]) as read:
        read.until_done()
        return [choice.to_dict() for choice in read.current_completion_snapshot.choices]


def read_response(data: bytes) -> Any:
    with openai_client(data) as api, api.responses.stream(model="sim", input="") as read:
        *_, last = read
    assert last.type in ("response.completed", "response.incomplete")
    return [last.response.status, *(item.to_dict() for item in last.response.output)]


def read_message(data: bytes) -> Any:
    with (
        anthropic.Anthropic(base_url="http://pool", api_key="none", http_client=sends(data)) as api,
        api.messages.stream(model="sim", max_tokens=1, messages=[]) as read,
    ):
        message = read.get_final_message()
    return [message.stop_reason, *(block.to_dict() for block in message.content)]


def read_ids(data: bytes) -> Any:
    """No library reads this dialect; its last event is all that is left to check."""
    assert data.endswith(b"data: [DONE]\n\n")


# --- the streams ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    path: str
    parts: Callable[[Json], Iterator[Part]]
    read: Callable[[bytes], Any]


COMPLETIONS = Dialect("/v1/completions", openai_parts, read_completion)
CHAT = Dialect("/v1/chat/completions", openai_parts, read_chat)
RESPONSES = Dialect("/v1/responses", response_parts, read_response)
MESSAGES = Dialect("/v1/messages", message_parts, read_message)
GENERATE = Dialect("/inference/v1/generate", openai_parts, read_ids)
USAGE: Json = {"stream_options": {"include_usage": True}}
TEXT: Json = {"max_tokens": TOKENS, "ignore_eos": True}
PARAMETERS: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 40}},
    "required": ["name"],
    "additionalProperties": False,
}
GREET: Json = {"name": "greet", "parameters": PARAMETERS}
REQUIRED: Json = {"tool_choice": "required", "parallel_tool_calls": False}
STOPS_THINKING: Json = {"logit_bias": {str(TOKENIZER.added_tokens["</think>"]): 50}}


@dataclass(frozen=True)
class Row:
    """`body` makes a stream's body of a text that no other one has; its seed is added."""

    name: str
    dialect: Dialect
    body: Callable[[str], Json]
    kinds: frozenset[str] = frozenset()  # that the answer must have, as they begin


def said(text: str) -> Json:
    return {"messages": [{"role": "user", "content": text}]}


ROWS = (
    Row("completions", COMPLETIONS, lambda text: {"prompt": text, "n": 2, **TEXT, **USAGE}),
    Row("chat", CHAT, lambda text: {**said(text), "n": 2, **TEXT, **USAGE, **SILENT}),
    Row(
        "chat, a call",
        CHAT,
        lambda text: {
            **{**said(text), **USAGE, **REQUIRED, **BUDGET, "max_tokens": 400},
            "tools": [{"type": "function", "function": GREET}],
        },
        frozenset({"reasoning", "call", "arguments"}),
    ),
    Row(
        "responses",
        RESPONSES,
        lambda text: {
            **{"input": text, "max_output_tokens": TOKENS, "ignore_eos": True, "top_logprobs": 2},
            "reasoning": {"effort": "none"},
        },
        frozenset({"response.output_text.delta"}),
    ),
    Row(
        "responses, a call",
        RESPONSES,
        lambda text: {
            **{"input": text, **REQUIRED, **STOPS_THINKING, "max_output_tokens": 400},
            "tools": [{"type": "function", **GREET}],
        },
        frozenset({"response.function_call_arguments.delta"}),
    ),
    Row(
        "messages",
        MESSAGES,
        lambda text: {**said(text), **TEXT, "thinking": {"type": "disabled"}},
        frozenset({"text_delta"}),
    ),
    Row(
        "messages, a call",
        MESSAGES,
        lambda text: {
            **{**said(text), "max_tokens": 400},
            "tools": [{"name": "greet", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 12},
        },
        frozenset({"thinking_delta", "signature_delta", "input_json_delta"}),
    ),
    Row(
        "generate",
        GENERATE,
        lambda text: {
            **{"token_ids": list(text.encode()), **USAGE},
            "sampling_params": {**TEXT, "n": 2, "logprobs": 1},
        },
        frozenset({"token"}),
    ),
)
DIALECTS = tuple(dict.fromkeys(row.dialect for row in ROWS))


@dataclass(frozen=True)
class Run:
    """One stream. `starts_s` after the others of its round."""

    row: Row
    body: Json
    starts_s: float

    @classmethod
    def draw(cls, row: Row, rng: random.Random) -> Run:
        body = row.body("".join(chr(rng.randrange(97, 123)) for _ in range(80)))
        sampling = {"temperature": 1.0, "seed": rng.getrandbits(31)}
        if "sampling_params" in body:
            body["sampling_params"] |= sampling
        else:
            body |= sampling
        return cls(row, body | {"stream": True}, rng.random() * SPREAD_S)


def ask(url: str, run: Run) -> tuple[RequestId, bytes]:
    """The request's id, and all bytes of its stream."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)
    try:
        connection.request(
            *("POST", run.row.dialect.path, json.dumps(run.body)),
            {"content-type": "application/json", "connection": "close"},
        )
        response = connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        return RequestId(response.headers["x-baton-request-id"]), data
    finally:
        connection.close()


def check(run: Run, request: RequestId, data: bytes, whole: tuple[RequestId, bytes]) -> None:
    """Raise AssertionError unless the stream is the undisturbed one."""
    dialect, name = run.row.dialect, run.row.name
    events = plain_events(data, request)
    if dialect is RESPONSES:
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events))), name
    parts = joined(part for event in events for part in dialect.parts(event))
    expected = joined(part for event in plain_events(*whole[::-1]) for part in dialect.parts(event))
    assert parts == expected, f"{name} {request}"
    kinds = {kind.partition(" ")[0] for choice in parts.values() for kind, _ in choice}
    assert kinds >= run.row.kinds, name
    shown = dialect.read(plain_stream(data, request))
    assert shown == dialect.read(plain_stream(*whole[::-1])), f"{name} {request}"


# --- the rounds -----------------------------------------------------------------------------------


class Rounds:
    """Rounds of streams on one pool. `positions` are the tokens of choice 0 with which streams lost
    their decode node; `jobs` is the number of streams that lost their prefill node before it was
    done."""

    def __init__(self, pool: Cluster, seed: str) -> None:
        self._pool = pool
        self._rng = random.Random(seed)
        self.positions: list[int] = []
        self.jobs = 0

    @property
    def hits(self) -> int:
        return len(self.positions) + self.jobs

    def run(self, rows: Sequence[Row], role: Role) -> set[Row]:
        """Run a stream per row while nodes of this role die. Return the rows that lost a node."""
        runs = [Run.draw(row, self._rng) for row in rows]
        self._pool.witness.forget()
        lost: set[RequestId] = set()
        nodes = self._pool.of_role(role)
        for node in nodes:
            if role == "decode":
                trap = self._decode_trap(node, len(runs) // len(nodes) or 1)
            else:
                trap = self._prefill_trap(node, len(runs), lost)
            self._pool.witness.set_trap(trap)
        with ThreadPoolExecutor(len(runs)) as threads:
            answers = list(threads.map(self._ask_later, runs))
            moved = self._note_positions([id for id, _ in answers]) if role == "decode" else lost
            self._pool.witness.forget()
            self._pool.repair()
            settle(self._pool)
            undisturbed = list(threads.map(lambda run: ask(self._pool.url, run), runs))
        for run, (id, data), whole in zip(runs, answers, undisturbed, strict=True):
            check(run, id, data, whole)
        if role == "prefill":
            self.jobs += len(lost)
        return {run.row for run, (id, _) in zip(runs, answers, strict=True) if id in moved}

    def _ask_later(self, run: Run) -> tuple[RequestId, bytes]:
        time.sleep(run.starts_s)
        return ask(self._pool.url, run)

    def _note_positions(self, ids: Sequence[RequestId]) -> set[RequestId]:
        """The requests that were placed again."""
        moved = set()
        for id in ids:
            last = self._pool.witness.of(id)[-1]
            if last.attempt > 1:
                moved.add(id)
                self.positions.append(last.tokens)
        return moved

    def _decode_trap(self, node: Node, streams: int) -> Trap:
        """Kills the node when its answers have a random number of tokens together."""
        left = self._rng.randrange(1, streams * LATEST)

        def fits(passing: Passing) -> bool:
            nonlocal left
            if passing.node == node.name and isinstance(passing.frame, Deltas):
                left -= sum(len(delta.ids) for delta in passing.frame.items)
            return left <= 0

        return Trap(fits, node.kill, after=True)

    def _prefill_trap(self, node: Node, streams: int, lost: set[RequestId]) -> Trap:
        """Kills the node when it has got a random number of jobs. `lost` gets those that it has not
        done."""
        jobs, got, done = self._rng.randrange(1, streams + 1), set[RequestId](), set[RequestId]()

        def fits(passing: Passing) -> bool:
            frame = passing.frame
            if passing.node != node.name:
                return False
            if isinstance(frame, PrefillDone):
                done.add(frame.request)
            elif isinstance(frame, PrefillJob):
                got.add(frame.request.id)
                return len(got) >= jobs
            return False

        def kill() -> None:
            lost.update(got - done)
            node.kill()

        return Trap(fits, kill, after=True)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = write_model(tmp_path_factory.mktemp("dialects"))
    flags = [*SIM, "--sim-eos-every=40", "--model", str(folder), "--served-model-name", "sim"]
    with Cluster(
        *(1, 2),
        flags=flags,
        prefill_flags=["--sim-prefill-ms-per-token=0.3"],
        decode_flags=[*SLOW_DECODE, SHORT_DRAIN],
        router_flags=["--handoff=always"],
        routers=2,
    ) as cluster:
        yield cluster


def test_a_stream_of_each_dialect_continues_when_its_node_dies(pool: Cluster) -> None:
    rounds = Rounds(pool, "each")
    left = set(ROWS)
    for _ in range(FEW_ROUNDS):
        left -= rounds.run([row for row in ROWS if row in left], "decode")
        if not left:
            break
    assert not left, f"no node died under {[row.name for row in left]}"
    rounds.run(ROWS, "prefill")
    assert rounds.jobs > 0


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_streams_continue_wherever_their_node_dies(dialect: Dialect, pool: Cluster) -> None:
    rows = [row for row in ROWS if row.dialect is dialect]
    rounds = Rounds(pool, dialect.path)
    for number in range(ROUNDS):
        rounds.run(rows * (AT_ONCE // len(rows)), "prefill" if number % 3 == 2 else "decode")
        if rounds.hits >= RUNS:
            break
    print(f"{rounds.hits} hits, {rounds.jobs} prefill jobs, {sorted(rounds.positions)}")
    assert rounds.hits >= RUNS
    assert rounds.jobs > 0
    assert len(set(rounds.positions)) >= RUNS // 5


# --- routers die ----------------------------------------------------------------------------------


async def kill_router(
    pool: Cluster, rows: Sequence[Row], rng: random.Random, dead: int, node: str = ""
) -> list[Stream]:
    """Run kept streams of these rows while a router dies. Return those that lost it after their
    first event."""
    runs = [Run.draw(row, rng) for row in rows]
    streams = [Stream(run.row.dialect.path, run.body) for run in runs]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await check_kill(pool, session, dead, streams, rng.randrange(2, 2 * LATEST), node=node)
        await asyncio.to_thread(pool.repair)
        await until_all_ready(session, pool)
    return [stream for stream in streams if stream.seen]


async def test_a_kept_stream_of_each_dialect_goes_on_when_its_router_dies(pool: Cluster) -> None:
    rng, left = random.Random("routers"), set(DIALECTS)
    for number in range(FEW_ROUNDS):
        rows = [row for row in ROWS if row.dialect in left]
        broken = {stream.path for stream in await kill_router(pool, rows, rng, number % 2)}
        left = {dialect for dialect in left if dialect.path not in broken}
        if not left:
            break
    assert not left, f"no router died under {[dialect.path for dialect in left]}"


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
async def test_kept_streams_go_on_wherever_their_router_dies(
    dialect: Dialect, pool: Cluster
) -> None:
    """Every third router takes a decode node along."""
    rng, positions = random.Random(dialect.path), list[int]()
    rows = [row for row in ROWS if row.dialect is dialect]
    for number in range(ROUNDS):
        node = f"decode-{number % 2}" if number % 3 == 2 else ""
        rows_at_once = rows * (AT_ONCE // len(rows))
        for stream in await kill_router(pool, rows_at_once, rng, number % 2, node):
            positions.append(stream.seen)
        if len(positions) >= RUNS:
            break
    print(f"{len(positions)} streams lost their router, with events: {sorted(positions)}")
    assert len(positions) >= RUNS
    assert len(set(positions)) >= RUNS // 5

"""Nodes die under `baton up`: what a client sees, what the pool says, and what no log may say.

One pool lives through it all once: answers, refusals, a node killed in mid-stream, a client that
leaves, a request that kills whoever runs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.support.clients.http import Answer, Json, complete, events, exchange, hang_up
from tests.support.pools.baton_up import Pool

pytestmark = pytest.mark.integration

WORD = "Xylofonquark"  # in everything that a client writes, and nowhere else
POISON = 7  # as a character: the simulated engine's tokens are bytes
FLAGS = ["--engine", "sim", "--chunk-blocks", "1", "--kv-blocks", "200", "--handoff", "always"]
FLAGS += ["--prefill", "1", "--decode", "2", "--sim-decode-ms", "20"]
FLAGS += [f"--sim-poison-token={POISON}", "--log-level", "info", "--json-logs"]
TOKENS = 200  # four seconds, in which a node is found and killed
STREAM: Json = {
    "prompt": f"{WORD}, as told by {WORD}: ",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 5,
    "stop": [f"{WORD} stops"],
    "user": WORD,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
KILL_AFTER = 10  # tokens


@dataclass(frozen=True)
class ChoiceAnswer:
    """What a client was told about one choice."""

    ids: tuple[int, ...]
    text: str
    finish: str | None
    usage: Json


@dataclass(frozen=True)
class FailureRun:
    """`log` is all that the pool said; nodes are those of /pool."""

    undisturbed: ChoiceAnswer
    disturbed: ChoiceAnswer
    killed: Json
    after: dict[str, Json]
    refused: list[int]
    poisoned: Answer
    innocent: ChoiceAnswer
    log: str

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """The processes' JSON lines, each with the process's name."""
        lines = re.findall(r"^(\S+) \| (\{.*\})$", self.log, re.MULTILINE)
        return [(name, json.loads(line)) for name, line in lines]


@pytest.fixture(scope="module")
def story() -> Iterator[FailureRun]:
    with Pool(FLAGS) as pool:
        complete(pool.url, STREAM["prompt"], max_tokens=1)  # from now on its chunks are stored
        undisturbed = told(events(pool.url, "/v1/completions", STREAM))
        disturbed, killed = kill_in_mid_stream(pool)
        whole(pool, killed)
        hang_up(pool.url, "/v1/completions", STREAM, 0.2)
        refused = refusals(pool)
        before = nodes(pool)
        running = events(pool.url, "/v1/completions", STREAM)
        first = next(running)
        poison = {"prompt": f"{WORD}{chr(POISON)}", "max_tokens": 4}
        poisoned = exchange(pool.url, "/v1/completions", poison)
        innocent = told(running, first)
        whole(pool, *before.values())
        yield FailureRun(
            undisturbed=undisturbed,
            disturbed=disturbed,
            killed=killed,
            after=nodes(pool),
            refused=refused,
            poisoned=poisoned,
            innocent=innocent,
            log=pool.log(),
        )


def nodes(pool: Pool) -> dict[str, Json]:
    return {node["id"]: node for node in pool.pool()["nodes"]}


def whole(pool: Pool, *dead: Json) -> None:
    """Wait until each of these nodes is back as another process, and the supervisor has seen it."""

    def back() -> bool:
        ready = {name: node["pid"] for name, node in nodes(pool).items() if node["in_use"]}
        return all(
            (pid := ready.get(node["id"], node["pid"])) != node["pid"]
            and f"{node['id']}: ready pid {pid} " in pool.log()
            for node in dead
        )

    pool.wait(back, "get its nodes back")


def told(stream: Iterator[Json], *seen: Json) -> ChoiceAnswer:
    ids: list[int] = []
    text, finish = "", None
    usage: Json = {}
    for event in (*seen, *stream):
        usage = event["usage"] or usage
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return ChoiceAnswer(tuple(ids), text, finish, usage)


def kill_in_mid_stream(pool: Pool) -> tuple[ChoiceAnswer, Json]:
    """What the stream brought, and the node that was killed under it."""
    stream = events(pool.url, "/v1/completions", STREAM)
    seen: list[Json] = []
    while sum(len(c.get("token_ids") or []) for e in seen for c in e["choices"]) < KILL_AFTER:
        seen.append(next(stream))
    [serving] = [node for node in nodes(pool).values() if node["booked"]["requests"]]
    psutil.Process(serving["pid"]).kill()
    return told(stream, *seen), serving


def refusals(pool: Pool) -> list[int]:
    bodies: list[Json | bytes] = [
        {"prompt": WORD, "max_tokens": WORD},
        {"prompt": WORD, "model": WORD},
        {"prompt": WORD, WORD: 1, "tools": [WORD]},
        {"prompt": WORD * 1000},
        f'{{"prompt": "{WORD}'.encode(),
    ]
    return [exchange(pool.url, "/v1/completions", body).status for body in bodies]


# --- what the client sees ---------------------------------------------------------------------


def test_a_stream_goes_on_exactly_when_the_nodes_below_it_die(story: FailureRun) -> None:
    assert story.disturbed == story.undisturbed
    assert len(story.disturbed.ids) == TOKENS
    assert story.innocent == story.undisturbed


def test_a_request_that_kills_its_nodes_ends_with_its_own_error(story: FailureRun) -> None:
    assert story.poisoned.status == 500
    assert story.poisoned.body["error"]["code"] == "request_kills_nodes"


# --- what the pool says -----------------------------------------------------------------------


def test_a_killed_node_is_back_under_its_name_as_another_process(story: FailureRun) -> None:
    now = story.after[story.killed["id"]]
    assert (now["state"], now["in_use"], now["role"]) == ("ready", True, "decode")
    assert now["epoch"] != story.killed["epoch"]


def test_the_supervisor_says_who_died_and_how(story: FailureRun) -> None:
    name = story.killed["id"]
    assert f"{name} was ended by SIGKILL; starting it again in 0.5 s\n" in story.log
    assert re.search(r"^\S+ exited with code 1 \(the engine process \d+ ended:", story.log, re.M)


def test_nodes_that_a_request_killed_are_all_back_as_fast_as_the_first_time(
    story: FailureRun,
) -> None:
    pauses = re.findall(r"starting it again in (\S+) s$", story.log, re.MULTILINE)
    assert len(pauses) >= 1 + 3
    assert set(pauses) == {"0.5"}


# --- what the logs say --------------------------------------------------------------------------


def test_a_request_can_be_followed_through_its_attempts(story: FailureRun) -> None:
    lost = [
        record
        for _, record in story.records()
        if record.get("node") == story.killed["id"] and "lost" in record["message"]
    ]
    assert lost[0]["attempt"] == 1
    [answered] = [
        record
        for _, record in story.records()
        if "attempts" in record and lost[0]["request"].startswith(record["request"])
    ]
    assert (answered["attempts"], answered["status"]) == (2, 200)
    assert answered["completion_tokens"] == TOKENS


def test_no_log_holds_what_a_client_wrote(story: FailureRun) -> None:
    assert story.refused == [400, 404, 400, 400, 400]
    assert {"router", "prefill-0", "decode-0", "decode-1"} <= {name for name, _ in story.records()}
    ids = list(WORD.encode())
    assert WORD.lower() not in story.log.lower()
    assert str(ids)[1:-1] not in story.log

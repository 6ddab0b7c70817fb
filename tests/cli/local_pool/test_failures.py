"""Nodes die under `baton up`: what clients see, what the pool reports, and what no log may hold.

One pool goes through every failure once: a node killed in mid-stream, a client that disconnects,
refused requests, a request that kills each node that runs it. The tests check its records.
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

WORD = "Xylofonquark"  # a word that only client requests contain
POISON = 7  # a token id and a character: the simulated engine's tokens are bytes
FLAGS = ["--engine", "sim", "--chunk-blocks", "1", "--kv-blocks", "200", "--handoff", "always"]
FLAGS += ["--prefill", "1", "--decode", "2", "--sim-decode-ms", "20"]
FLAGS += [f"--sim-poison-token={POISON}", "--log-level", "info", "--json-logs"]
TOKENS = 200  # four seconds, time enough to find and kill the node
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
    """One choice as a client received it."""

    ids: tuple[int, ...]
    text: str
    finish: str | None
    usage: Json


@dataclass(frozen=True)
class FailureRun:
    """Records of the pool's failures. Nodes are entries of /pool; `log` is all its output."""

    undisturbed: ChoiceAnswer
    disturbed: ChoiceAnswer
    killed: Json
    after: dict[str, Json]
    refused: list[int]
    poisoned: Answer
    innocent: ChoiceAnswer
    log: str

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """Each JSON log line with the name of its process."""
        lines = re.findall(r"^(\S+) \| (\{.*\})$", self.log, re.MULTILINE)
        return [(name, json.loads(line)) for name, line in lines]


@pytest.fixture(scope="module")
def run() -> Iterator[FailureRun]:
    with Pool(FLAGS) as pool:
        complete(pool.url, STREAM["prompt"], max_tokens=1)  # stores the prompt's chunks
        undisturbed = collect_answer(events(pool.url, "/v1/completions", STREAM))
        disturbed, killed = kill_in_mid_stream(pool)
        wait_restarted(pool, killed)
        hang_up(pool.url, "/v1/completions", STREAM, 0.2)
        refused = refusals(pool)
        before = nodes(pool)
        running = events(pool.url, "/v1/completions", STREAM)
        first = next(running)
        poison = {"prompt": f"{WORD}{chr(POISON)}", "max_tokens": 4}
        poisoned = exchange(pool.url, "/v1/completions", poison)
        innocent = collect_answer(running, first)
        wait_restarted(pool, *before.values())
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


def wait_restarted(pool: Pool, *dead: Json) -> None:
    """Wait until each of these nodes runs again as a new process that the supervisor reports."""

    def back() -> bool:
        ready = {name: node["pid"] for name, node in nodes(pool).items() if node["in_use"]}
        return all(
            (pid := ready.get(node["id"], node["pid"])) != node["pid"]
            and f"{node['id']}: ready pid {pid} " in pool.log()
            for node in dead
        )

    pool.wait(back, "get its nodes back")


def collect_answer(stream: Iterator[Json], *seen: Json) -> ChoiceAnswer:
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
    """Kill the node that serves a stream; return the stream's answer and that node."""
    stream = events(pool.url, "/v1/completions", STREAM)
    seen: list[Json] = []
    while sum(len(c.get("token_ids") or []) for e in seen for c in e["choices"]) < KILL_AFTER:
        seen.append(next(stream))
    [serving] = [node for node in nodes(pool).values() if node["booked"]["requests"]]
    psutil.Process(serving["pid"]).kill()
    return collect_answer(stream, *seen), serving


def refusals(pool: Pool) -> list[int]:
    bodies: list[Json | bytes] = [
        {"prompt": WORD, "max_tokens": WORD},
        {"prompt": WORD, "model": WORD},
        {"prompt": WORD, WORD: 1, "tools": [WORD]},
        {"prompt": WORD * 1000},
        f'{{"prompt": "{WORD}'.encode(),
    ]
    return [exchange(pool.url, "/v1/completions", body).status for body in bodies]


# --- clients ----------------------------------------------------------------------------------


def test_a_stream_continues_with_the_same_tokens_when_its_node_dies(run: FailureRun) -> None:
    assert run.disturbed == run.undisturbed
    assert len(run.disturbed.ids) == TOKENS
    assert run.innocent == run.undisturbed


def test_a_request_that_kills_its_nodes_ends_with_request_kills_nodes(run: FailureRun) -> None:
    assert run.poisoned.status == 500
    assert run.poisoned.body["error"]["code"] == "request_kills_nodes"


# --- the pool's reports -----------------------------------------------------------------------


def test_a_killed_node_is_restarted_under_its_name_with_a_new_epoch(run: FailureRun) -> None:
    now = run.after[run.killed["id"]]
    assert (now["state"], now["in_use"], now["role"]) == ("ready", True, "decode")
    assert now["epoch"] != run.killed["epoch"]


def test_the_supervisor_reports_which_node_died_and_how(run: FailureRun) -> None:
    name = run.killed["id"]
    assert f"{name} was ended by SIGKILL; restarting it in 0.5 s\n" in run.log
    assert re.search(r"^\S+ exited with code 1 \(the engine process \d+ ended:", run.log, re.M)


def test_nodes_that_a_request_killed_are_restarted_without_a_longer_wait(
    run: FailureRun,
) -> None:
    pauses = re.findall(r"restarting it in (\S+) s$", run.log, re.MULTILINE)
    assert len(pauses) >= 1 + 3
    assert set(pauses) == {"0.5"}


# --- logs ---------------------------------------------------------------------------------------


def test_logs_name_the_attempts_of_a_request(run: FailureRun) -> None:
    lost = [
        record
        for _, record in run.records()
        if record.get("node") == run.killed["id"] and "lost" in record["message"]
    ]
    assert lost[0]["attempt"] == 1
    [answered] = [
        record
        for _, record in run.records()
        if "attempts" in record and lost[0]["request"].startswith(record["request"])
    ]
    assert (answered["attempts"], answered["status"]) == (2, 200)
    assert answered["completion_tokens"] == TOKENS


def test_no_log_holds_text_or_tokens_of_a_client(run: FailureRun) -> None:
    assert run.refused == [400, 404, 400, 400, 400]
    assert {"router", "prefill-0", "decode-0", "decode-1"} <= {name for name, _ in run.records()}
    ids = list(WORD.encode())
    assert WORD.lower() not in run.log.lower()
    assert str(ids)[1:-1] not in run.log

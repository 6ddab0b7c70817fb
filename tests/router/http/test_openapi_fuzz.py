"""Schemathesis: requests that the OpenAPI document allows and forbids, sent to a router with
simulated nodes. No answer is a server error, and the document describes every answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from baton_router.http.live_routes import LIVE_PATH
from baton_router.http.openapi_operations import OPERATIONS
from tests.support.clients.http import events, exchange, text_of
from tests.support.pools.leaks import settle
from tests.support.pools.processes import SIM, Cluster

pytestmark = pytest.mark.integration

SEED = 2
# A schema cannot express the model's limits and vocabulary, and the router has no API keys.
UNCHECKED = "positive_data_acceptance,ignored_auth"
TIME_S = 800
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/inference/v1/generate"
_ANSWERED = re.compile(r"^baton_router_requests_total\{(.*)\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    files = tmp_path_factory.mktemp("files")
    with Cluster(1, 1, flags=SIM, router_flags=[f"--file-store={files}"]) as cluster:
        yield cluster


def run_schemathesis(url: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Run Schemathesis and return its report. A failure shows its output."""
    report = folder / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *(f"--seed={SEED}", "--request-timeout=120", f"--exclude-checks={UNCHECKED}"),
            f"--exclude-path={LIVE_PATH}",  # its answer has no end
            *("--report=json", f"--report-json-path={report}", *flags),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIME_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def served(url: str) -> dict[str, float]:
    """Number of generation requests answered with 200, by endpoint."""
    counts = {}
    for text, value in _ANSWERED.findall(text_of(url, "/metrics")):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        if labels["code"] == "200":
            counts[labels["endpoint"]] = float(value)
    return counts


def check(cluster: Cluster, folder: Path, min_cases: int, *flags: str) -> None:
    report = run_schemathesis(cluster.url, folder, *flags)
    cases = report["test_cases"]
    assert cases["generated"] >= min_cases
    assert (cases["with_failures"], cases["errored"], report["errors"]) == (0, 0, [])
    # Schemathesis leaves out the route of the document itself, and run_schemathesis() another.
    operations = report["operations"]
    assert (operations["total"], operations["tested"]) == (len(OPERATIONS) - 1, len(OPERATIONS) - 2)
    # Ids of a generated body are seldom in the vocabulary.
    assert set(served(cluster.url)) >= {"chat", "completions", "messages", "responses"}, (
        "some requests of these endpoints must succeed"
    )
    settle(cluster)


def test_50_generated_requests_get_documented_answers(cluster: Cluster, tmp_path: Path) -> None:
    check(cluster, tmp_path, 40, "--phases=fuzzing", "--max-examples=12")


@pytest.mark.long
def test_2000_generated_requests_get_documented_answers(cluster: Cluster, tmp_path: Path) -> None:
    check(cluster, tmp_path, 2000, "--phases=coverage,fuzzing", "--max-examples=100")


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"return_token_ids": True, "n": 2}])
@pytest.mark.parametrize("usage", [None, "at the end", "always"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_every_event_and_answer_matches_the_document(
    cluster: Cluster, path: str, usage: str | None, more: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "temperature": 0, **more}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "tell"}]
        if "logprobs" in more:
            body |= {"logprobs": True, "top_logprobs": 2}
    else:
        body |= {"prompt": "tell", "echo": True}
    if usage is not None:
        continuous = usage == "always"
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": continuous}
    if path == GENERATE:
        body = generate_body(body)
    document = exchange(cluster.url, "/openapi.json").body
    event_validator = validator(document, path, "text/event-stream")
    stream = list(events(cluster.url, path, body))
    assert len(stream) > 4
    for event in stream:
        event_validator.validate(event)
    unstreamed = {name: value for name, value in body.items() if name != "stream_options"}
    scored = {"prompt_logprobs": 1}
    if path == GENERATE:
        scored = {"sampling_params": body["sampling_params"] | scored}
    answer = exchange(cluster.url, path, {**unstreamed, **scored})
    assert answer.status == 200, answer.body
    validator(document, path, "application/json").validate(answer.body)


def generate_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a completion as one of ids."""
    own = {"stream_options", "return_token_ids"}
    sampling = body.keys() - own - {"prompt", "echo"}
    return {
        **{name: body[name] for name in own & body.keys()},
        **{"token_ids": [116, 101, 108, 108], "output_mode": "text"},
        "sampling_params": {name: body[name] for name in sampling},
    }


def validator(document: dict[str, Any], path: str, kind: str) -> Any:
    """A validator for an answer, or for the data of one event."""
    content = document["paths"][path]["post"]["responses"]["200"]["content"][kind]["schema"]
    if kind == "text/event-stream":
        schema = content["properties"]["data"]["anyOf"][1]["contentSchema"]["anyOf"][0]
    else:
        schema = content
    return jsonschema_rs.validator_for({**schema, "components": document["components"]})

"""No log and no page contains client data, generated text, or the secrets that separate tenants.

The test plants API keys, the tenant secret, texts, stop strings, a user name, header values and
token ids in requests to a pool of processes at their default log level. The requests succeed, fail,
are malformed, are aborted, or lose their node.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.hashing import tenant_salt
from tests.support.clients.http import events, exchange, hang_up, text_of
from tests.support.pools.processes import SIM, Cluster

pytestmark = pytest.mark.integration

KEY, WRONG_KEY, SECRET, TOKEN = (
    "sk-planted-key",
    "sk-planted-wrong",
    "planted-secret",
    "planted-tok",
)
SALT = tenant_salt(SECRET.encode(), "acme")
TEXT = "planted-text"
IDS = [211, 3, 197, 5, 223, 7, 199, 11, 227]
BEARER = {"Authorization": f"Bearer {KEY}"}
HEADERS = {**BEARER, "x-planted-name": "planted-header", "cookie": "planted-cookie"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOGGED_S = 60.0


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": TEXT, "name": "planted-name"}]
    fields = {
        "messages": messages,
        "max_tokens": 6,
        "user": "planted-user",
        "stop": ["planted-stop"],
    }
    return {**fields, "metadata": {"planted-pair": "planted-value"}, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": IDS * 20, "max_tokens": 12, "user": "planted-user", **more}


MALFORMED: list[tuple[str, dict[str, Any] | bytes]] = [
    (COMPLETIONS, b'{"prompt": "planted-broken'),
    (COMPLETIONS, b'"planted-string"'),
    (COMPLETIONS, completion(temperature="planted-temperature")),
    (COMPLETIONS, completion(stop=["planted-stop", ""])),
    (COMPLETIONS, completion(prompt=[*IDS, 9_999])),
    (COMPLETIONS, completion(model="planted-model")),
    (COMPLETIONS, completion(prompt=[*IDS] * 999)),
    (CHAT, chat(messages=[{"role": "planted-role"}])),
    (CHAT, chat(logit_bias={"planted-id": 1})),
    (CHAT, chat(cache_salt="planted-salt")),
    ("/v1/planted-path?planted=query", {}),
    ("/nodes/planted-node/drain", {"reason": "planted-reason"}),
]
POST_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer " + KEY.encode() + b"\r\n"
)
RAW = (
    b"GET /planted-raw HTTP/1.1\r\nHost: localhost\r\nplanted name: planted-line\r\n\r\n",
    b"planted-method / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: planted-length\r\n\r\n",
    POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\nplanted-chunk\r\n",
    POST_HEAD + b"Content-Encoding: deflate\r\nContent-Length: 12\r\n\r\nplanted-body",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"acme {KEY} admin\n")
    common = (f"--link-token={TOKEN}", "--json-logs")
    tenant_flags = (f"--api-keys={keys}", "--sharing=tenant", f"--tenant-secret={SECRET}")
    slow = ("--sim-decode-ms=20",)
    with Cluster(
        *(1, 2),
        flags=(*SIM, *common, *slow),
        router_flags=(*common, *tenant_flags),
        watch_answers=False,
        asking=BEARER,
    ) as cluster:
        yield cluster


def send_raw(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 16):
            pass


def send_requests(cluster: Cluster) -> list[str]:
    """Send every sort of request; return the generated texts and token ids."""
    url, generated = cluster.url, []
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion(logprobs=2, echo=True))):
        answer = exchange(url, path, {**body, "return_token_ids": True}, HEADERS)
        assert answer.status == 200, answer.body
        choice = answer.body["choices"][0]
        generated.append(choice.get("text") or choice["message"]["content"])
        generated.append(", ".join(map(str, choice["token_ids"])))
        assert exchange(url, path, body, {"Authorization": f"Bearer {WRONG_KEY}"}).status == 401
        hang_up(url, path, {**body, "max_tokens": 500, "stream": True}, 0.3, HEADERS)
    for path, malformed in MALFORMED:
        assert exchange(url, path, malformed, HEADERS).status in (400, 401, 404)
    for data in RAW:
        send_raw(cluster.router.port, data)
    return generated


def lose_a_node(cluster: Cluster) -> str:
    """Kill a node mid-stream; return the stream's text."""
    reply = events(cluster.url, COMPLETIONS, completion(max_tokens=100), BEARER)
    texts = [next(reply)["choices"][0]["text"]]
    [busy] = [node["id"] for node in cluster.pool()["nodes"] if node["load"]["running"]][:1] or [""]
    cluster.nodes[busy or "decode-0"].kill()
    texts += [event["choices"][0]["text"] for event in reply]
    cluster.repair()
    return "".join(texts)


def logs(cluster: Cluster) -> str:
    return "\n".join(process.log_text() for process in cluster.processes())


def test_no_log_and_no_page_contains_planted_data(cluster: Cluster) -> None:
    generated = [*send_requests(cluster), lose_a_node(cluster)]
    until = time.monotonic() + LOGGED_S
    while logs(cluster).count('"status": 499') < 2:
        assert time.monotonic() < until, logs(cluster)[-3000:]
        time.sleep(0.05)
    log = logs(cluster)
    for expected in ('"status": 200', '"status": 401', '"status": 400', '"tenant": "acme"'):
        assert expected in log, "the logs do not cover the requests"
    pages = [
        text_of(cluster.url, path, BEARER) for path in ("/metrics", "/pool", "/ready", "/health")
    ]
    for node in cluster.nodes.values():
        pages += [text_of(node.url, path) for path in ("/metrics", "/health")]
    everything = "\n".join([log, *pages])
    for planted in ("planted", SALT, ", ".join(map(str, IDS[:4])), *filter(bool, generated)):
        assert len(planted) > 5
        assert (at := everything.find(planted)) < 0, everything[max(0, at - 300) : at + 100]

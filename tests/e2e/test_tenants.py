"""Tenants over several nodes and a store: what one computed serves no other, unless they share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from baton_protocol.hashing import tenant_salt
from tests.support.clients.http import Answer, Json, exchange
from tests.support.engines.tiny_models import prompt_of as ids_of
from tests.support.pools.baton_up import Pool

COMPLETIONS = "/v1/completions"
TENANTS = 100
SECRET = "known to this test, and to no client"
ADMIN = "the-admins-key"
TOKENS = 200
OWNER = "t0"
OTHERS = 5  # how many more tenants ask: more than there are nodes
# Of who computes prompts: each says that something was there already.
HITS = (
    "cached_prompt_tokens_total",
    "fetched_prompt_tokens_total",
    "matched_blocks_total",
    "fetched_blocks_total",
    "used_blocks_total",
    "fetched_chunks_total",
    "reused_chunks_total",
    "announced_chunks_total",
)
SIM = ("--engine", "sim", "--sim-prefill-ms-per-token", "0.2")
TORCH = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "800")
# Nodes that publish what they computed as they go, and pairs of nodes that hand over.
WHOLE = ("--prefill", "0", "--decode", "3", "--write-behind-bandwidth", "1GiB")
PAIRS = ("--prefill", "2", "--decode", "2", "--handoff", "always")
LAYOUTS = {"whole": (WHOLE, "decode"), "pairs": (PAIRS, "prefill")}


def prompt_of(seed: int) -> list[int]:
    """Ids that the byte tokenizer knows too."""
    return [token % 250 for token in ids_of(TOKENS, seed=seed)]


def key_of(tenant: str) -> str:
    return f"sk-of-{tenant}"


class Service:
    """A pool with TENANTS tenants, OWNER and `fresh()` ones; `computing` is the role of the nodes
    that compute prompts."""

    def __init__(self, pool: Pool, computing: str) -> None:
        self.pool = pool
        self._computing = computing
        self._numbers = itertools.count(1)

    def fresh(self) -> str:
        """A tenant that has never asked."""
        number = next(self._numbers)
        assert number < TENANTS
        return f"t{number}"

    def send(
        self,
        tenant: str,
        prompt: list[int],
        fields: Json | None = None,
        headers: dict[str, str] | None = None,
        path: str = COMPLETIONS,
    ) -> tuple[Answer, float]:
        """The answer, and after how many milliseconds its one token came."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        key = {"authorization": f"Bearer {key_of(tenant)}"}
        began = time.perf_counter()
        answer = exchange(self.pool.url, path, body | (fields or {}), key | (headers or {}))
        return answer, 1000 * (time.perf_counter() - began)

    def counters(self) -> Json:
        """Those in HITS, of the nodes that compute prompts, and what all have published."""
        published = self.pool.totals()["published_chunks_total"]  # waits until all is told
        nodes = [one for one in self.pool.pool()["nodes"] if one["role"] == self._computing]
        told = {name: sum(node["load"][name] for node in nodes) for name in HITS}
        return told | {"published_chunks_total": published}


def hits(counters: Json) -> Json:
    return {name: counters[name] for name in HITS}


def cached(answer: Answer) -> int:
    assert answer.status == 200, answer.body
    tokens: int = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def is_all_new(answer: Answer) -> bool:
    """To who computed it, and to the router's prediction before."""
    placement = answer.headers["x-baton-placement"]
    predicted = (
        f"uncached {TOKENS} of {TOKENS} tokens" in placement and "store has" not in placement
    )
    return cached(answer) == 0 and predicted


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pool]:
    """`serve(sharing, flags)`: a pool that is not started yet."""
    path = tmp_path_factory.mktemp("tenants") / "keys"
    names = [f"t{number}" for number in range(TENANTS)]
    path.write_text("".join(f"{name} {key_of(name)}\n" for name in names))

    def made(sharing: str, *flags: str) -> Pool:
        words = (*flags, "--fetch", "always", "--chunk-blocks", "1")
        words += ("--api-keys", str(path), "--sharing", sharing)
        secrets = {"BATON_TENANT_SECRET": SECRET, "BATON_ADMIN_KEY": ADMIN}
        return Pool(words, environment=secrets)

    return made


@pytest.fixture(
    scope="module",
    params=["sim whole", "sim pairs", pytest.param("torch pairs", marks=pytest.mark.long)],
)
def apart(
    request: pytest.FixtureRequest,
    serve: Callable[..., Pool],
    tiny_model: Callable[[str], Path],
) -> Iterator[Service]:
    """Tenants that share nothing."""
    engine, layout = request.param.split()
    flags = SIM if engine == "sim" else (*TORCH, "--model", str(tiny_model("llama-gqa4")))
    roles, computing = LAYOUTS[layout]
    with serve("tenant", *flags, *roles, "--log-level", "debug") as pool:
        yield Service(pool, computing)


def test_no_counter_counts_a_hit_across_tenants_and_one_tenant_hits(
    apart: Service, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    prompt = prompt_of(seed=61)
    start = apart.counters()
    first, first_ms = apart.send(OWNER, prompt)
    assert is_all_new(first), first.headers
    before = apart.counters()
    assert before["published_chunks_total"] - start["published_chunks_total"] == TOKENS // 16
    assert hits(before) == hits(start)
    others = [apart.send(apart.fresh(), prompt) for _ in range(OTHERS)]
    for answer, _ in others:
        assert is_all_new(answer), (answer.headers, answer.body)
    assert hits(apart.counters()) == hits(before)
    again = [apart.send(OWNER, prompt) for _ in range(OTHERS)]
    for answer, _ in again:
        # All but the tail behind the last full block; at least one token is computed.
        assert cached(answer) == TOKENS - TOKENS % 16, answer.headers
        assert not is_all_new(answer)
    after = apart.counters()
    assert after["matched_blocks_total"] >= before["matched_blocks_total"] + OTHERS * (TOKENS // 16)
    assert len({tuple(one.body["choices"][0]["token_ids"]) for one, _ in others + again}) == 1
    with capsys.disabled():
        shown = [" ".join(f"{ms:.0f}" for _, ms in told) for told in (others, again)]
        print(
            f"\nfirst token, {request.node.callspec.id}: {first_ms:.0f} ms when it is new;", end=""
        )
        print(f" other tenants {shown[0]}; the same tenant {shown[1]}")


@pytest.mark.parametrize("layout", ["pairs", pytest.param("whole", marks=pytest.mark.long)])
def test_tenants_that_share_find_what_another_computed(
    serve: Callable[..., Pool], layout: str
) -> None:
    roles, computing = LAYOUTS[layout]
    with serve("pool", *SIM, *roles) as pool:
        shared = Service(pool, computing)
        prompt = prompt_of(seed=62)
        assert is_all_new(shared.send(OWNER, prompt)[0])
        before = shared.counters()
        for _ in range(OTHERS):
            answer, _ = shared.send(shared.fresh(), prompt)
            assert cached(answer) == TOKENS - TOKENS % 16
        after = shared.counters()
        assert after["matched_blocks_total"] > before["matched_blocks_total"]


class Try(NamedTuple):
    """What a client sends to be taken for OWNER, and the status of its answer."""

    title: str
    fields: Json | None = None
    headers: dict[str, str] | None = None
    query: str = ""
    status: int = 200


SALT = tenant_salt(SECRET.encode(), OWNER)  # no client knows it; not even that would help
KEY = key_of(OWNER)
REFUSED: Json = {
    "cache_salt": SALT,
    "salt": SALT,
    "tenant": OWNER,
    "adapter": "x",
    "adapter_digest": "0",
    "service_tier": OWNER,
    "extra_body": {"cache_salt": SALT, "tenant": OWNER},
    "extra_headers": {"authorization": f"Bearer {KEY}"},
    "tenant_id": OWNER,
    "tenant_salt": SALT,
    "x-baton-tenant": OWNER,
    "api_key": KEY,
    "authorization": f"Bearer {KEY}",
    "lora": OWNER,
    "kv_transfer_params": {"salt": SALT, "do_remote_prefill": True},
    "request": {"salt": SALT, "tenant": OWNER},
    "sharing": "pool",
}
READ_PAST: Json = {
    "user": OWNER,
    "metadata": {"tenant": OWNER, "cache_salt": SALT},
    "prompt_cache_key": SALT,
    "safety_identifier": OWNER,
    "session_id": SALT,
}
HEADERS = {
    "x-tenant": OWNER,
    "x-tenant-id": OWNER,
    "x-cache-salt": SALT,
    "x-baton-tenant": OWNER,
    "x-baton-salt": SALT,
    "x-baton-cache-salt": SALT,
    "x-baton-sharing": "pool",
    "x-baton-request-id": "0",
    "x-baton-placement": "decode=decode-0",
    "x-api-key": KEY,
    "proxy-authorization": f"Bearer {KEY}",
    "x-forwarded-user": OWNER,
    "openai-organization": OWNER,
    "openai-project": OWNER,
    "cookie": f"tenant={OWNER}; salt={SALT}",
}
TRIES = (
    *(Try(f"field {name}", {name: value}, status=400) for name, value in REFUSED.items()),
    *(Try(f"field {name}", {name: value}) for name, value in READ_PAST.items()),
    *(Try(f"header {name}", headers={name: value}) for name, value in HEADERS.items()),
    Try("a query", query=f"?tenant={OWNER}&cache_salt={SALT}&api_key={KEY}"),
)


@pytest.mark.parametrize("apart", ["sim whole"], indirect=True)
def test_no_field_and_no_header_takes_a_client_for_another_tenant(apart: Service) -> None:
    pool, prompt = apart.pool, prompt_of(seed=63)
    assert is_all_new(apart.send(OWNER, prompt)[0])
    before = apart.counters()
    for title, fields, headers, query, status in TRIES:
        path = COMPLETIONS + query
        answer, _ = apart.send(apart.fresh(), prompt, fields, headers, path)
        assert answer.status == status, (title, answer.body)
        if status == 200:
            assert is_all_new(answer), (title, answer.headers, answer.body)
        else:
            assert answer.body["error"]["param"] in title
    assert hits(apart.counters()) == hits(before)
    # They are still there for who computed them.
    assert cached(apart.send(OWNER, prompt)[0]) > 0
    shown = pool.log() + pool.get("/pool") + pool.get("/metrics")
    shown += "".join(" ".join(one.cmdline()) for one in pool.processes())
    assert "400: 0 prompt and 0 completion tokens" in shown
    secrets = [SECRET, ADMIN, *(key_of(f"t{number}") for number in range(TENANTS))]
    secrets += [tenant_salt(SECRET.encode(), f"t{number}") for number in range(TENANTS)]
    assert [word for word in secrets if word in shown] == []

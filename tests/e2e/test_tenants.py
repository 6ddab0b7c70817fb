"""Tenants in a pool with several nodes and a store: a tenant reuses the KV of another only if the
pool shares."""

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
OTHERS = 5  # number of other tenants, more than there are nodes
# Counters of the nodes that compute prompts. Each increases with a cache hit.
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
# Decode nodes that write their chunks behind, and prefill and decode nodes with hand-offs.
WHOLE = ("--prefill", "0", "--decode", "3", "--write-behind-bandwidth", "1GiB")
PAIRS = ("--prefill", "2", "--decode", "2", "--handoff", "always")
LAYOUTS = {"whole": (WHOLE, "decode"), "pairs": (PAIRS, "prefill")}


def prompt_of(seed: int) -> list[int]:
    """Ids that are also in the byte tokenizer's vocabulary."""
    return [token % 250 for token in ids_of(TOKENS, seed=seed)]


def key_of(tenant: str) -> str:
    return f"sk-of-{tenant}"


class Service:
    """A pool with TENANTS tenants: OWNER, and unused ones from `fresh()`. `computing` is the role
    of the nodes that compute prompts."""

    def __init__(self, pool: Pool, computing: str) -> None:
        self.pool = pool
        self._computing = computing
        self._numbers = itertools.count(1)

    def fresh(self) -> str:
        """A tenant that has not sent a request yet."""
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
        """Send a request for one token. Returns the response and its duration in milliseconds."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        key = {"authorization": f"Bearer {key_of(tenant)}"}
        started = time.perf_counter()
        response = exchange(self.pool.url, path, body | (fields or {}), key | (headers or {}))
        return response, 1000 * (time.perf_counter() - started)

    def counters(self) -> Json:
        """The HITS of the nodes that compute prompts, and the published chunks of all nodes."""
        # totals() waits until all nodes have reported.
        published = self.pool.totals()["published_chunks_total"]
        nodes = [one for one in self.pool.pool()["nodes"] if one["role"] == self._computing]
        totals = {name: sum(node["load"][name] for node in nodes) for name in HITS}
        return totals | {"published_chunks_total": published}


def hits(counters: Json) -> Json:
    return {name: counters[name] for name in HITS}


def cached(response: Answer) -> int:
    assert response.status == 200, response.body
    tokens: int = response.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def is_all_new(response: Answer) -> bool:
    """Whether the node used no cached token, and the router predicted none."""
    placement = response.headers["x-baton-placement"]
    predicted = (
        f"uncached {TOKENS} of {TOKENS} tokens" in placement and "store has" not in placement
    )
    return cached(response) == 0 and predicted


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pool]:
    """`serve(sharing, flags)` makes a pool, which the caller starts."""
    path = tmp_path_factory.mktemp("tenants") / "keys"
    names = [f"t{number}" for number in range(TENANTS)]
    path.write_text("".join(f"{name} {key_of(name)}\n" for name in names))

    def make_pool(sharing: str, *flags: str) -> Pool:
        arguments = (*flags, "--fetch", "always", "--chunk-blocks", "1")
        arguments += ("--api-keys", str(path), "--sharing", sharing)
        secrets = {"BATON_TENANT_SECRET": SECRET, "BATON_ADMIN_KEY": ADMIN}
        return Pool(arguments, environment=secrets)

    return make_pool


@pytest.fixture(
    scope="module",
    params=["sim whole", "sim pairs", pytest.param("torch pairs", marks=pytest.mark.long)],
)
def isolated(
    request: pytest.FixtureRequest,
    serve: Callable[..., Pool],
    tiny_model: Callable[[str], Path],
) -> Iterator[Service]:
    """A pool whose tenants do not share KV."""
    engine, layout = request.param.split()
    flags = SIM if engine == "sim" else (*TORCH, "--model", str(tiny_model("llama-gqa4")))
    roles, computing = LAYOUTS[layout]
    with serve("tenant", *flags, *roles, "--log-level", "debug") as pool:
        yield Service(pool, computing)


def test_a_tenant_hits_only_its_own_cached_blocks(
    isolated: Service, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    prompt = prompt_of(seed=61)
    start = isolated.counters()
    first, first_ms = isolated.send(OWNER, prompt)
    assert is_all_new(first), first.headers
    before = isolated.counters()
    assert before["published_chunks_total"] - start["published_chunks_total"] == TOKENS // 16
    assert hits(before) == hits(start)
    others = [isolated.send(isolated.fresh(), prompt) for _ in range(OTHERS)]
    for response, _ in others:
        assert is_all_new(response), (response.headers, response.body)
    assert hits(isolated.counters()) == hits(before)
    again = [isolated.send(OWNER, prompt) for _ in range(OTHERS)]
    for response, _ in again:
        # All tokens up to the last full block are cached.
        assert cached(response) == TOKENS - TOKENS % 16, response.headers
        assert not is_all_new(response)
    after = isolated.counters()
    assert after["matched_blocks_total"] >= before["matched_blocks_total"] + OTHERS * (TOKENS // 16)
    assert len({tuple(one.body["choices"][0]["token_ids"]) for one, _ in others + again}) == 1
    with capsys.disabled():
        times = [" ".join(f"{ms:.0f}" for _, ms in calls) for calls in (others, again)]
        print(
            f"\nfirst token, {request.node.callspec.id}: {first_ms:.0f} ms when it is new;", end=""
        )
        print(f" other tenants {times[0]}; the same tenant {times[1]}")


@pytest.mark.parametrize("layout", ["pairs", pytest.param("whole", marks=pytest.mark.long)])
def test_with_sharing_tenants_reuse_the_kv_of_other_tenants(
    serve: Callable[..., Pool], layout: str
) -> None:
    roles, computing = LAYOUTS[layout]
    with serve("pool", *SIM, *roles) as pool:
        shared = Service(pool, computing)
        prompt = prompt_of(seed=62)
        assert is_all_new(shared.send(OWNER, prompt)[0])
        before = shared.counters()
        for _ in range(OTHERS):
            response, _ = shared.send(shared.fresh(), prompt)
            assert cached(response) == TOKENS - TOKENS % 16
        after = shared.counters()
        assert after["matched_blocks_total"] > before["matched_blocks_total"]


class Attempt(NamedTuple):
    """A request that tries to act as OWNER, and the expected status."""

    title: str
    fields: Json | None = None
    headers: dict[str, str] | None = None
    query: str = ""
    status: int = 200


SALT = tenant_salt(SECRET.encode(), OWNER)  # unknown to clients, but even knowing it must not help
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
IGNORED: Json = {
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
ATTEMPTS = (
    *(Attempt(f"field {name}", {name: value}, status=400) for name, value in REFUSED.items()),
    *(Attempt(f"field {name}", {name: value}) for name, value in IGNORED.items()),
    *(Attempt(f"header {name}", headers={name: value}) for name, value in HEADERS.items()),
    Attempt("a query", query=f"?tenant={OWNER}&cache_salt={SALT}&api_key={KEY}"),
)


@pytest.mark.parametrize("isolated", ["sim whole"], indirect=True)
def test_no_field_header_or_query_makes_a_client_another_tenant(isolated: Service) -> None:
    pool, prompt = isolated.pool, prompt_of(seed=63)
    assert is_all_new(isolated.send(OWNER, prompt)[0])
    before = isolated.counters()
    for title, fields, headers, query, status in ATTEMPTS:
        path = COMPLETIONS + query
        response, _ = isolated.send(isolated.fresh(), prompt, fields, headers, path)
        assert response.status == status, (title, response.body)
        if status == 200:
            assert is_all_new(response), (title, response.headers, response.body)
        else:
            assert response.body["error"]["param"] in title
    assert hits(isolated.counters()) == hits(before)
    # The owner's blocks are still cached.
    assert cached(isolated.send(OWNER, prompt)[0]) > 0
    exposed = pool.log() + pool.get("/pool") + pool.get("/metrics")
    exposed += "".join(" ".join(one.cmdline()) for one in pool.processes())
    assert "400: 0 prompt and 0 completion tokens" in exposed
    secrets = [SECRET, ADMIN, *(key_of(f"t{number}") for number in range(TENANTS))]
    secrets += [tenant_salt(SECRET.encode(), f"t{number}") for number in range(TENANTS)]
    assert [secret for secret in secrets if secret in exposed] == []

"""What the operator finds wrong with an external store: real servers, words for the status."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

import pytest

from baton_cli.commands.up import reserve_port
from baton_operator.api.pool import Pool
from baton_operator.kube.egress import Address
from baton_operator.state.index_reader import IndexReader, Login
from baton_operator.state.lookups import Lookups
from baton_operator.state.store_check import StoreProblem
from tests.operator.foreign_servers import foreign_server, nothing
from tests.operator.index_servers import LOGIN
from tests.support.clock import Clock
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import observed, status_of, verdict

pytestmark = pytest.mark.integration

LOCAL = (ip_network("127.0.0.0/8"),)
ANSWER_S = 10.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def pool_of(index: str, data: str) -> Pool:
    store = {"indexUrl": index, "dataUrls": [data]}
    return sample_pool("sim", kvStore={"external": store})


def resolve(host: str, port: int) -> tuple[Address, ...]:
    if host == "unknown.example":
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return (ip_address("127.0.0.1" if host == "localhost" else host),)


async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\nsecret of an internal service")
    await writer.drain()
    writer.close()


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def quotes_us(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"-ERR secret of an internal service\r\n")
    await writer.drain()


@pytest.fixture
def closed() -> Iterator[str]:
    with reserve_port("127.0.0.1", 0) as held:
        yield f"redis://127.0.0.1:{held.getsockname()[1]}"


async def problem_of(
    index: str, data: str, login: Login = LOGIN, *, everywhere: bool = False
) -> StoreProblem | None:
    pool = pool_of(index, data)
    networks = () if everywhere else LOCAL
    reader = IndexReader(Clock(), ANSWER_S, networks, Lookups(resolve))
    await reader.read(pool, observed(pool), None, login)
    return reader.problem


class Wrong(NamedTuple):
    """A server (a URL, or what listens there), and the words that its problem must contain."""

    title: str
    server: str | Serve
    words: str
    sure: bool = True
    login: Login = LOGIN


WRONG = (
    Wrong("an unknown name", "redis://unknown.example:7000", "its host name is unknown"),
    Wrong("a closed port", "closed", "it refuses the connection"),
    Wrong("a wrong password", "good", "it refuses the login", login=Login(password="no")),
    Wrong("a user that it does not have", "good", "it refuses the login",
          login=Login(username="nobody", password=LOGIN.password)),
    Wrong("no login", "good", "it requires a login", login=Login()),
    Wrong("a web server", web_server, "it does not answer as a Redis server"),
    Wrong("a server that hangs up", hangs_up, "it closed the connection"),
    Wrong("a server with another protocol's errors", quotes_us, "an error instead of a reply"),
    Wrong("a server that never answers", nothing, "no answer in time", sure=False),
    Wrong("TLS where there is none", "rediss", "does it use TLS?", sure=False),
    Wrong("an address outside of the networks", "redis://10.1.2.3", "in none of the networks",
          sure=False),
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.title for wrong in WRONG])
async def test_each_wrong_server_is_named_with_the_cause_in_both_roles(
    wrong: Wrong, redis_url: str, closed: str
) -> None:
    known = {"closed": closed, "good": redis_url, "rediss": redis_url.replace("redis:", "rediss:")}
    async with foreign_server(wrong.server if callable(wrong.server) else nothing) as listener:
        url = (
            f"redis://127.0.0.1:{listener.port}"
            if callable(wrong.server)
            else known.get(wrong.server, wrong.server)
        )
        found = {"index": await problem_of(url, "redis://127.0.0.1:1", wrong.login)}
        if wrong.server != "good":  # one login is for all servers
            found["data"] = await problem_of(redis_url.replace("127.0.0.1", "localhost"), url)
    for role, problem in found.items():
        assert problem is not None, role
        address = url if url.count(":") > 1 else f"{url}:6379"
        assert problem.words.startswith(f"{role} server {address}: "), problem
        assert wrong.words in problem.words
        assert problem.sure is wrong.sure
        assert "secret of" not in problem.words
        assert not wrong.login.password or wrong.login.password not in problem.words


@pytest.mark.parametrize("host", ["169.254.169.254", "localhost", "224.0.0.1", "[fd00:ec2::254]"])
async def test_an_address_that_the_operator_never_connects_to_is_a_problem(host: str) -> None:
    problem = await problem_of(f"redis://{host}:6379", "redis://127.0.0.2:1", everywhere=True)
    assert problem is not None
    assert problem.sure
    assert f"redis://{host}:6379: the operator may not connect to it" in problem.words


async def test_a_store_that_answers_has_no_problem(redis_url: str) -> None:
    assert await problem_of(redis_url, f"{redis_url.replace('127.0.0.1', 'localhost')}/1") is None


async def test_a_corrected_address_is_tried_at_once(redis_url: str, closed: str) -> None:
    reader = IndexReader(Clock(), ANSWER_S, LOCAL, Lookups(resolve))
    wrong = pool_of(closed, redis_url.replace("127.0.0.1", "127.0.0.2"))
    for _ in range(2):
        await reader.read(wrong, observed(wrong), None, LOGIN)
    right = pool_of(redis_url, closed)
    assert reader.due_in(wrong, observed(wrong), None) != 0
    assert reader.due_in(right, observed(right), None) == 0


# --- the condition --------------------------------------------------------------------------------

EXTERNAL = sample_pool("external")
SURE = StoreProblem(role="index", server="redis://kv:6379", cause="its host name is unknown")
UNSURE = StoreProblem(role="index", server="redis://kv:6379", cause="no answer", sure=False)
DATA = StoreProblem(role="data", server="redis://kv:6379", cause="its host name is unknown")
NO_ROUTER: dict[str, Any] = {"others": ()}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (NO_ROUTER | {"store_problem": SURE}, ("False", "ExternalFailing")),
        (NO_ROUTER | {"store_problem": UNSURE}, ("Unknown", "ExternalUnreachable")),
        ({"store_problem": SURE}, ("True", "ExternalInUse")),
        ({"store_problem": DATA, "nodes": ()}, ("False", "ExternalFailing")),
        ({"store_problem": DATA, "nodes": o.reports(EXTERNAL, store="down")},
         ("False", "ExternalFailing")),
    ],
)  # fmt: skip
def test_the_condition_names_the_server_and_the_cause(
    seen: dict[str, Any], expected: tuple[str, str]
) -> None:
    status = status_of(observed(EXTERNAL, **seen), EXTERNAL)
    assert verdict(status, "StoreReady") == expected
    condition = status.condition("StoreReady")
    assert condition is not None
    assert "redis://kv:6379: " in condition.message


def test_ready_names_the_store_s_problem_before_what_waits_for_it() -> None:
    for problem in (SURE, UNSURE):
        seen = observed(EXTERNAL, store_problem=problem, others=(), prefill=(), decode=())
        ready = status_of(seen, EXTERNAL).condition("Ready")
        assert ready is not None
        assert ready.message == f"StoreReady: {problem.words}"


def test_a_store_that_answered_before_is_silent_with_the_cause() -> None:
    before = status_of(observed(EXTERNAL, nodes=()), EXTERNAL)
    one = status_of(observed(EXTERNAL, store_problem=SURE), EXTERNAL, before)
    assert verdict(one, "StoreReady") == ("True", "ExternalAnswers")
    three = status_of(observed(EXTERNAL, store_problem=SURE, silent=True), EXTERNAL, before)
    assert verdict(three, "StoreReady") == ("Unknown", "ExternalSilent")
    condition = three.condition("StoreReady")
    assert condition is not None
    assert condition.message == SURE.words

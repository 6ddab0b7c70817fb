"""How exact an answer is: "bitwise" only if each node that any of its attempts ran on is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton_protocol.ids import Epoch, NodeId, RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import Exact
from baton_router.requests.state import KEPT_ATTEMPTS, RequestRecord
from tests.router import pools
from tests.support.clock import Clock
from tests.support.nodes.fake_node import FakeNode
from tests.support.pools.placements import BASIS, placement_on

HEADER = "x-baton-exact"


async def exactness_of(client: pools.Client, headers: dict[str, str]) -> tuple[Exact, list[Exact]]:
    """The exactness of a call, and that of each attempt."""
    call = await pools.explanation_of(client, headers["x-baton-request-id"])
    return call["exact"], [attempt["exact"] for attempt in call["requests"][0]["attempts"]]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("handoff", "decode", "prefill", "stated"),
    [
        ("never", "bitwise", "numeric", "bitwise"),
        ("never", "numeric", "bitwise", "numeric"),
        ("always", "bitwise", "bitwise", "bitwise"),
        ("always", "bitwise", "numeric", "numeric"),
        ("always", "numeric", "bitwise", "numeric"),
    ],
)
async def test_an_answer_or_stream_is_as_exact_as_all_nodes_of_its_placement(
    handoff: str, decode: Exact, prefill: Exact, stated: Exact
) -> None:
    async with (
        FakeNode("decode-0", "decode", exact=decode) as first,
        FakeNode("prefill-0", "prefill", exact=prefill) as second,
        pools.running(first, second, handoff=handoff) as client,
    ):
        answer = await client.post("/v1/completions", pools.ask())
        assert (pools.text_of(answer), answer[2][HEADER]) == (pools.REPLY, stated)
        assert await exactness_of(client, answer[2]) == (stated, [stated])
        url, body = client.url + "/v1/completions", pools.ask(stream=True)
        async with client.session.post(url, json=body) as streamed:
            assert streamed.headers[HEADER] == stated
        assert (await client.node("decode-0"))["exact"] == decode


@pytest.mark.integration
@pytest.mark.parametrize(
    ("first", "second", "stated"),
    [
        ("bitwise", "bitwise", "bitwise"),
        ("bitwise", "numeric", "numeric"),
        ("numeric", "bitwise", "numeric"),
    ],
)
async def test_after_a_failover_an_answer_is_as_exact_as_the_nodes_of_all_attempts(
    first: Exact, second: Exact, stated: Exact
) -> None:
    async with (
        FakeNode("decode-0", "decode", exact=first) as lost,
        FakeNode("decode-1", "decode", exact=second) as other,
    ):
        lost.script.run = "half"
        async with pools.running(lost) as client:
            answer = pools.completing(client)
            await pools.half_sent(client)
            await pools.join(client, other)
            await lost.stop()
            done = await answer
            assert (pools.text_of(done), done[2][HEADER]) == (pools.REPLY, stated)
            assert await exactness_of(client, done[2]) == (stated, [first, second])


@pytest.mark.integration
async def test_an_answer_with_several_prompts_is_as_exact_as_the_nodes_of_all_prompts() -> None:
    async with (
        FakeNode("decode-0", "decode", exact="bitwise") as first,
        FakeNode("decode-1", "decode", exact="numeric") as second,
        pools.running(first, second, placement="round-robin") as client,
    ):
        _, _, headers = await client.post("/v1/completions", pools.ask(prompt=["a", "b"]))
        assert headers[HEADER] == "numeric"


@pytest.mark.integration
async def test_an_answer_whose_request_has_no_node_does_not_say_how_exact_it_is(
    decode: FakeNode,
) -> None:
    async with pools.running(decode, missing_role="fail") as client:
        await decode.say_load("draining")
        await client.ready(0)
        status, _, headers = await client.post("/v1/completions", pools.ask())
        assert (status, HEADER in headers) == (503, False)


def test_a_record_remembers_the_numeric_attempt_that_it_did_not_keep() -> None:
    request = Request(
        id=RequestId("r"), attempt=1, prompt_ids=(1, 2), params=SamplingParams(), outputs=((),)
    )
    record = RequestRecord(request, Clock())
    for number in range(KEPT_ATTEMPTS + 2):
        basis = BASIS if number != 1 else replace(BASIS, exact="numeric")
        record.start_attempt(placement_on(NodeId(f"decode-{number}")), Epoch("e"), basis)
        record.on_lost(NodeId(f"decode-{number}"), "link", blamed=False)
    assert {attempt.basis.exact for attempt in record.attempts} == {"bitwise"}
    assert record.exact == "numeric"

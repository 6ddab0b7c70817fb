"""A streamed response continues when its node dies: text, ids and items are those of an undisturbed
run, and the numbers of its events have no gap."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.faults.conftest import SLOW_DECODE
from tests.support.pools.processes import SIM, Cluster

pytestmark = [pytest.mark.integration, pytest.mark.long]

BODY: dict[str, Any] = {
    "model": "sim",
    "input": "Tell me of trains.",
    "max_output_tokens": 120,
    "temperature": 1.0,
    "extra_body": {"seed": 7, "ignore_eos": True},
}
KILLED_AT = 20  # deltas


def test_a_stream_continues_when_its_node_dies() -> None:
    with (
        Cluster(0, 2, flags=SIM, decode_flags=SLOW_DECODE) as pool,
        openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as client,
    ):
        undisturbed = client.responses.create(**BODY)
        events = []
        for event in client.responses.create(stream=True, **BODY):
            events.append(event)
            deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
            if len(deltas) == KILLED_AT and event.type == "response.output_text.delta":
                [busy] = [node for node in pool.pool()["nodes"] if node["booked"]["requests"]]
                pool.nodes[busy["id"]].kill()
        pool.repair()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert "".join(deltas) == last.response.output_text == undisturbed.output_text
    assert len(deltas) > KILLED_AT
    [item], [expected] = last.response.output, undisturbed.output
    ids = [item.id.replace(last.response.id[5:], ""), expected.id.replace(undisturbed.id[5:], "")]
    assert ids[0] == ids[1] == "msg_0000"
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == BODY["max_output_tokens"]

"""A stream of the Messages API continues when its node dies: its blocks are those of an undisturbed
answer, thinking and its signature included."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from baton_protocol.ids import RequestId
from tests.faults.conftest import SHORT_DRAIN, SLOW_DECODE
from tests.support.faults.tool_runs import write_model
from tests.support.pools.leaks import settle
from tests.support.pools.processes import SIM, Cluster

if TYPE_CHECKING:
    from anthropic.types import Message

pytestmark = pytest.mark.integration

KILLED_AT = 6  # tokens of thinking
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 40}},
    "required": ["name"],
    "additionalProperties": False,
}
ASK: Any = {
    "model": "sim",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Who is there? " * 8}],
    "tools": [{"name": "greet", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 12},
    "extra_body": {"seed": 7},
}


def blocks(message: Message) -> list[dict[str, Any]]:
    """The blocks without the ids of calls, which differ by request."""
    return [block.to_dict() | {"id": ""} for block in message.content]


@pytest.mark.long  # with nodes that only pretend, `test_messages_http` has the same
def test_blocks_continue_when_their_node_dies(tmp_path_factory: pytest.TempPathFactory) -> None:
    import anthropic

    folder = write_model(tmp_path_factory.mktemp("messages"))
    flags = [*SIM, "--sim-eos-every=40", "--model", str(folder), "--served-model-name", "sim"]
    with (
        Cluster(
            *(1, 2),
            flags=flags,
            decode_flags=[*SLOW_DECODE, SHORT_DRAIN],
            router_flags=["--handoff=always"],
        ) as pool,
        anthropic.Anthropic(base_url=pool.url, api_key="none", max_retries=0) as api,
    ):
        undisturbed = api.messages.create(**ASK)
        with api.messages.stream(**ASK) as stream:
            placement = stream.response.headers["x-baton-placement"]
            [node] = re.findall(r"decode=(\S+)", placement)
            for number, _ in enumerate(stream):
                if number == KILLED_AT:
                    pool.nodes[node].kill()
            moved = stream.get_final_message()
        placed = pool.witness.of(RequestId(moved.id.removeprefix("msg_")))
        assert placed[-1].attempt > 1
        assert [block.type for block in moved.content] == ["thinking", "tool_use"]
        assert blocks(moved) == blocks(undisturbed)
        assert moved.stop_reason == undisturbed.stop_reason == "tool_use"
        assert moved.usage.output_tokens == undisturbed.usage.output_tokens
        pool.repair()
        settle(pool)

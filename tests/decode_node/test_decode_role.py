"""Which jobs a decode node accepts, and which it refuses."""

from __future__ import annotations

import pytest

from baton_decode_node.admission import DecodeRole
from baton_decode_node.serve import serve
from baton_node.errors import SetupError
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch
from baton_protocol.link import Load, RunJob
from baton_protocol.store import NodeLoad, Speeds
from tests.support.nodes.processes import make_request

JOB = RunJob(make_request("r", b"prompt"))


def load(**figures: int) -> Load:
    return Load(Epoch("e"), "ready", Speeds(), NodeLoad(**figures))


def test_running_requests_do_not_count_against_new_ones() -> None:
    assert DecodeRole(max_queued=2).refuse(JOB, load(running=500, waiting=1)) is None


def test_a_request_is_refused_when_too_many_are_queued_or_parked() -> None:
    refusal = DecodeRole(max_queued=2).refuse(JOB, load(waiting=1, parked=1))
    assert refusal is not None
    assert (refusal.code, refusal.retryable) == ("saturated", True)
    assert "2 sequences" in refusal.message


async def test_a_decode_node_does_not_serve_settings_of_a_prefill_node() -> None:
    with pytest.raises(SetupError, match="prefill"):
        await serve(NodeSettings(node="n", role="prefill", engine="sim"), "never.started")

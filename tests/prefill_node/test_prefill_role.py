"""Which jobs a prefill node accepts, and which it refuses."""

from __future__ import annotations

import pytest

from baton_node.errors import SetupError
from baton_node.settings import NodeSettings
from baton_prefill_node.admission import PrefillRole
from baton_prefill_node.serve import serve
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Load, PrefillJob, RunJob
from baton_protocol.store import NodeLoad, Speeds
from tests.support.nodes.processes import make_request

JOB = PrefillJob(make_request("r", b"prompt"), NodeId("d0"), Epoch("e"))


def load(queued: int, speed: float) -> Load:
    return Load(
        Epoch("e"), "ready", Speeds(prefill_tokens_per_s=speed), NodeLoad(queued_tokens=queued)
    )


def test_a_job_is_accepted_while_the_queue_is_short() -> None:
    assert PrefillRole(max_queue_s=2.0).refuse(JOB, load(2000, 1000.0)) is None


def test_a_job_that_would_wait_too_long_is_refused_with_a_retryable_error() -> None:
    refusal = PrefillRole(max_queue_s=2.0).refuse(JOB, load(5000, 1000.0))
    assert refusal is not None
    assert (refusal.code, refusal.status, refusal.retryable) == ("saturated", 429, True)
    assert refusal.retry_after == pytest.approx(3.0)
    assert "5000 prompt tokens" in refusal.message


def test_a_whole_request_is_accepted() -> None:
    assert PrefillRole().refuse(RunJob(JOB.request), load(100, 1000.0)) is None


def test_without_a_measured_speed_nothing_is_refused() -> None:
    assert PrefillRole().refuse(JOB, load(10**9, 0.0)) is None


async def test_a_prefill_node_does_not_serve_settings_of_a_decode_node() -> None:
    with pytest.raises(SetupError, match="decode"):
        await serve(NodeSettings(node="n", role="decode", engine="sim"), "never.started")

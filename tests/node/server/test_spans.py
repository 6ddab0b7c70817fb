"""A node records a span for each ended job of a traced request, and none for other jobs."""

from __future__ import annotations

import msgspec
import pytest

from baton_node.ipc.messages import Prompted, Step
from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Abort, JobFailed, RequestStats, RunJob
from baton_protocol.request import Request
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import EPOCH_S, TableNode, open_job, prefill, tokens_of

TRACE, PARENT = "ab" * 16, "cd" * 8
STATS = RequestStats(
    prompt_tokens=6,
    cached_tokens=4,
    computed_tokens=2,
    handoff_ms=4.0,
    queue_ms=1.0,
    fetch_ms=2.0,
    prefill_ms=3.0,
)


def traced(flags: str = "01", **params: int) -> Request:
    request = make_request("r", b"prompt", **params)
    return msgspec.structs.replace(request, traceparent=f"00-{TRACE}-{PARENT}-{flags}")


def test_a_finished_request_has_a_span_below_the_router_s_span(node: TableNode) -> None:
    request = traced(max_tokens=3)
    open_job(node, RunJob(request))
    node.clock.advance(2.5)
    node.table.send_step(Step(prompts=(Prompted("r", 1, STATS),)))  # type: ignore[arg-type]
    node.emit(*tokens_of(request, 0, b"abc"))
    (span,) = node.spans
    assert (span.name, span.served, span.error) == ("decode", True, "")
    assert (span.place.trace_id, span.place.parent_id) == (TRACE, PARENT)
    assert span.place.span_id not in ("", PARENT)
    assert (span.start_ns, span.end_ns) == ((EPOCH_S + 100) * 1e9, (EPOCH_S + 102.5) * 1e9)
    attributes = {name: value for name, value in span.attributes.items() if value}
    assert attributes == {
        "baton.request": "r",
        "baton.attempt": 1,
        "baton.node": "n",
        "baton.handoff_ms": 4.0,
        "baton.queue_ms": 1.0,
        "baton.fetch_ms": 2.0,
        "baton.prefill_ms": 3.0,
        "baton.prompt_tokens": 6,
        "baton.cached_tokens": 4,
        "baton.computed_tokens": 2,
    }


def test_a_prefill_job_has_a_span_once_its_first_token_is_sent(node: TableNode) -> None:
    request = traced(max_tokens=3)
    open_job(node, prefill(request))
    node.emit(*tokens_of(request, 0, b"a", finish=None))
    assert [span.name for span in node.spans] == ["prefill"]


def test_the_span_of_a_failed_job_has_the_error_code(node: TableNode) -> None:
    open_job(node, RunJob(traced()))
    node.table.fail_request(JobFailed(traced().id, 1, ErrorRecord("no", "engine_error")))
    assert [span.error for span in node.spans] == ["engine_error"]


def test_a_request_that_is_aborted_twice_has_one_span(node: TableNode) -> None:
    open_job(node, RunJob(traced()))
    node.table.abort_request(Abort(traced().id, 1))
    node.table.abort_request(Abort(traced().id, 1))
    (span,) = node.spans
    assert (span.attributes["baton.aborted"], span.error) == (True, "")


@pytest.mark.parametrize("request_", [make_request("r", b"prompt", max_tokens=1), traced("00")])
def test_an_untraced_request_has_no_span(node: TableNode, request_: Request) -> None:
    open_job(node, RunJob(request_))
    node.emit(*tokens_of(request_, 0, b"a"))
    assert node.spans == []

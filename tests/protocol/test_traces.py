"""W3C `traceparent`: which traces are continued, replaced by a new one, or not recorded."""

from __future__ import annotations

import pytest

from baton_protocol.traces import Place, begin, below

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_client_s_trace_continues_below_its_span() -> None:
    place = begin(f" 00-{TRACE}-{SPAN}-01 ")
    assert place is not None
    assert (place.trace_id, place.parent_id) == (TRACE, SPAN)
    assert place.span_id not in ("", SPAN)
    assert place.traceparent == f"00-{TRACE}-{place.span_id}-01"


def test_a_trace_without_the_sampled_flag_is_not_recorded() -> None:
    assert begin(f"00-{TRACE}-{SPAN}-00") is None
    assert begin(f"00-{TRACE}-{SPAN}-02") is None
    assert begin(f"00-{TRACE}-{SPAN}-03") is not None


def test_a_later_version_may_have_more_fields() -> None:
    place = begin(f"cc-{TRACE}-{SPAN}-01-more-fields")
    assert place is not None
    assert place.trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}\n-{SPAN}-01",
    ],
)
def test_an_invalid_header_starts_a_new_trace(header: str) -> None:
    first, second = begin(header), begin(header)
    assert first is not None
    assert second is not None
    assert first.parent_id == ""
    assert first.trace_id not in (TRACE, second.trace_id)
    assert (len(first.trace_id), len(first.span_id)) == (32, 16)


def test_a_child_span_is_in_the_same_trace() -> None:
    place = Place(TRACE, SPAN)
    child = below(place)
    assert (child.trace_id, child.parent_id) == (TRACE, SPAN)
    assert child.span_id != SPAN

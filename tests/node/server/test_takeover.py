"""A stream that is cut anywhere and continued has the text and the end of an uncut stream.

Each reply consists of a few characters and parts of characters. Stop strings consist of the same
characters, so they cross the cuts and coincide with min_tokens, the last allowed token and EOS.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from baton_engine.interface import TokenOut
from baton_protocol.link import RunJob
from baton_protocol.request import Request
from baton_protocol.sampling import FinishReason
from baton_text.artifacts import BYTE_EOS_ID
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import (
    FakeLink,
    Reader,
    TableNode,
    lose_link,
    open_job,
    reconnect,
    tokens_of,
)

PIECES = st.sampled_from([b"a", b"b", b"c", "é".encode(), "€".encode(), b"\xc3", b"\xe2\x82"])


@dataclass(frozen=True)
class Stream:
    """A request, and the ids and the end that an unstopped engine reports for each choice."""

    request: Request
    replies: tuple[tuple[int, ...], ...]
    ends: tuple[FinishReason, ...]

    def tokens(self, attempt: int = 1) -> list[TokenOut]:
        """Return the tokens of all choices in the order of the steps."""
        request = make_request(self.request.id, b"p", attempt, n=len(self.replies))
        per_choice = [
            tokens_of(request, choice, ids, end)
            for choice, (ids, end) in enumerate(zip(self.replies, self.ends, strict=True))
        ]
        return sorted((token for tokens in per_choice for token in tokens), key=lambda t: t.offset)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    replies: list[tuple[int, ...]] = []
    ends: list[FinishReason] = []
    for _ in range(draw(st.integers(1, 2))):
        ids = tuple(b"".join(draw(st.lists(PIECES, min_size=1, max_size=8))))
        end: FinishReason = draw(st.sampled_from(("length", "stop")))
        replies.append((*ids, BYTE_EOS_ID) if end == "stop" else ids)
        ends.append(end)
    longest = max(map(len, replies))
    request = make_request(
        "r",
        b"p",
        n=len(replies),
        max_tokens=longest,
        min_tokens=draw(st.integers(0, longest)),
        stop=tuple(draw(st.lists(st.text("abcé€", min_size=1, max_size=3), max_size=2))),
        include_stop_str_in_output=draw(st.booleans()),
    )
    return Stream(request, tuple(replies), tuple(ends))


def undisturbed(stream: Stream) -> Reader:
    node, router = TableNode(), Reader(stream.request)
    link = open_job(node, RunJob(stream.request))
    node.emit(*stream.tokens())
    router.read(link.deltas())
    assert router.finished
    return router


@given(streams(), st.data())
def test_another_node_continues_a_stream_without_a_difference(
    stream: Stream, data: st.DataObject
) -> None:
    router = Reader(stream.request)
    for attempt in (1, 2, 3):
        node, job = TableNode(), router.job(attempt)
        link = open_job(node, job)
        for token in stream.tokens(attempt):
            if token.offset >= len(job.request.outputs[token.choice]):
                node.emit(token)
        deltas = link.deltas()
        router.read(deltas if attempt == 3 else deltas[: data.draw(st.integers(0, len(deltas)))])
        if router.finished:
            break
    assert router == undisturbed(stream)


@given(streams(), st.data())
def test_repeatedly_broken_links_do_not_change_a_stream(
    stream: Stream, data: st.DataObject
) -> None:
    node, router = TableNode(), Reader(stream.request)
    link = open_job(node, RunJob(stream.request))
    num_read = 0

    def read(everything: bool) -> None:
        nonlocal num_read
        deltas = link.deltas()[num_read:]
        if not everything:
            deltas = deltas[: data.draw(st.integers(0, len(deltas)))]
        router.read(deltas)
        num_read += len(deltas)

    for token in stream.tokens():
        node.emit(token)
        if data.draw(st.booleans()):
            read(everything=False)
            if router.finished:
                break
            lose_link(node, link)
            link, num_read = reconnect(node, router.job()), 0
    read(everything=True)
    assert router == undisturbed(stream)


@given(streams())
def test_a_first_token_from_a_prefill_node_does_not_change_a_stream(stream: Stream) -> None:
    prefill, decode = TableNode(), TableNode()
    router, link = Reader(stream.request), FakeLink()
    open_job(decode, RunJob(stream.request, await_first=True))
    prefill_link = open_job(prefill, RunJob(stream.request))
    prefill.emit(*(token for token in stream.tokens() if token.offset == 0))
    router.read(prefill_link.deltas())
    if not router.finished:
        assert decode.table.resume_job(router.job(), link)
        decode.emit(*(token for token in stream.tokens() if token.offset > 0))
        router.read(link.deltas())
    assert router == undisturbed(stream)

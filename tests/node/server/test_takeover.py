"""Wherever a stream is cut, whoever goes on with it gives the text and the end it would have had.

Replies are bytes of half characters, and stop strings of the same few characters: they straddle the
cuts, and meet min_tokens, the last allowed token and EOS.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from baton_node.ipc.messages import Token
from baton_protocol.link import RunJob
from baton_protocol.request import Request
from baton_text.artifacts import BYTE_EOS_ID
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import (
    Finish,
    Pipe,
    Reader,
    TableNode,
    begin,
    come_back,
    lose,
    tokens_of,
)

PIECES = st.sampled_from([b"a", b"b", b"c", "é".encode(), "€".encode(), b"\xc3", b"\xe2\x82"])


@dataclass(frozen=True)
class Stream:
    """What an engine would say of each choice, were it not stopped."""

    request: Request
    replies: tuple[tuple[int, ...], ...]
    ends: tuple[Finish, ...]

    def tokens(self, attempt: int = 1) -> list[Token]:
        """Of all choices, step by step."""
        request = make_request(self.request.id, b"p", attempt, n=len(self.replies))
        each = [
            tokens_of(request, choice, ids, end)
            for choice, (ids, end) in enumerate(zip(self.replies, self.ends, strict=True))
        ]
        return sorted((token for tokens in each for token in tokens), key=lambda t: t.offset)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    replies: list[tuple[int, ...]] = []
    ends: list[Finish] = []
    for _ in range(draw(st.integers(1, 2))):
        ids = tuple(b"".join(draw(st.lists(PIECES, min_size=1, max_size=8))))
        end: Finish = draw(st.sampled_from(("length", "stop")))
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
    link = begin(node, RunJob(stream.request))
    node.say(*stream.tokens())
    router.read(link.deltas())
    assert router.over
    return router


@given(streams(), st.data())
def test_another_node_goes_on_as_if_nothing_had_happened(
    stream: Stream, data: st.DataObject
) -> None:
    router = Reader(stream.request)
    for attempt in (1, 2, 3):
        node, job = TableNode(), router.job(attempt)
        link = begin(node, job)
        for token in stream.tokens(attempt):
            if token.offset >= len(job.request.outputs[token.choice]):
                node.say(token)
        seen = link.deltas()
        router.read(seen if attempt == 3 else seen[: data.draw(st.integers(0, len(seen)))])
        if router.over:
            break
    assert router == undisturbed(stream)


@given(streams(), st.data())
def test_a_link_that_breaks_again_and_again_costs_nothing(
    stream: Stream, data: st.DataObject
) -> None:
    node, router = TableNode(), Reader(stream.request)
    link = begin(node, RunJob(stream.request))
    read = 0

    def see(everything: bool) -> None:
        nonlocal read
        unread = link.deltas()[read:]
        some = unread if everything else unread[: data.draw(st.integers(0, len(unread)))]
        router.read(some)
        read += len(some)

    for token in stream.tokens():
        node.say(token)
        if data.draw(st.booleans()):
            see(everything=False)
            if router.over:
                break
            lose(node, link)
            link, read = come_back(node, router.job()), 0
    see(everything=True)
    assert router == undisturbed(stream)


@given(streams())
def test_a_first_token_from_elsewhere_changes_nothing_either(stream: Stream) -> None:
    first, second = TableNode(), TableNode()
    router, link = Reader(stream.request), Pipe()
    begin(second, RunJob(stream.request, await_first=True))
    one = begin(first, RunJob(stream.request))
    first.say(*(token for token in stream.tokens() if token.offset == 0))
    router.read(one.deltas())
    if not router.over:
        assert second.table.goes_on(router.job(), link)
        second.say(*(token for token in stream.tokens() if token.offset > 0))
        router.read(link.deltas())
    assert router == undisturbed(stream)

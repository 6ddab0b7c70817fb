"""A node's request table without sockets and engine, and a router that reads its frames.

In: messages that a test sends as the engine and as routers. Out: the frames that a router would
get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton_engine.interface import Complete, TokenOut
from baton_node.ipc.messages import Step, ToEngine
from baton_node.server.links import RouterLink
from baton_node.server.metrics import NodeMetrics
from baton_node.server.request_table import KeptLimits, RequestTable
from baton_node.server.spans import NodeSpans
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Delta, Deltas, Load, PrefillJob, RunJob, ToRouter
from baton_protocol.request import Request
from baton_protocol.sampling import FinishReason
from baton_protocol.store import NodeLoad, Speeds
from baton_protocol.traces import Span
from baton_text.artifacts import byte_artifacts
from baton_text.tokenizer import Tokenizer
from tests.support.clock import Clock

TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())
GRACE_S = 5.0
EPOCH_S = 1_000_000.0  # when the clock of a TableNode was 0, in Unix seconds


class FakeLink(RouterLink):
    """A link whose frames a test reads. If `broken`, it drops frames."""

    def __init__(self, router: str = "") -> None:
        self.router = router
        self.frames: list[ToRouter] = []
        self.broken = False

    def send(self, record: ToRouter) -> None:
        if not self.broken:
            self.frames.append(record)

    def deltas(self) -> list[Delta]:
        frames = [frame for frame in self.frames if isinstance(frame, Deltas)]
        return [delta for frame in frames for delta in frame.items]


class TableNode:
    """A request table. `sent` holds the messages to its engine, `spans` its traced spans."""

    def __init__(self, limits: KeptLimits | None = None) -> None:
        self.spans: list[Span] = []
        self.sent: list[ToEngine] = []
        self.clock = Clock()
        self.metrics = NodeMetrics(
            NodeId("n"), lambda: Load(Epoch("e"), "ready", Speeds(), NodeLoad())
        )
        self.table = RequestTable(
            TOKENIZER,
            self.sent.append,
            self.metrics,
            GRACE_S,
            clock=self.clock,
            spans=NodeSpans(
                self.spans.append, NodeId("n"), self.clock, lambda: self.clock.now + EPOCH_S
            ),
            limits=limits,
        )

    def take(self, job: RunJob, link: RouterLink) -> None:
        """Take a job as the node's service does once its role has accepted it."""
        if not self.table.resume_job(job, link):
            self.table.open_request(job, link)

    def emit(self, *tokens: TokenOut | Complete) -> None:
        made = tuple(token for token in tokens if isinstance(token, TokenOut))
        ended = tuple(token for token in tokens if isinstance(token, Complete))
        self.table.send_step(Step(made, complete=ended))


def tokens_of(
    request: Request, choice: int, ids: Sequence[int], finish: FinishReason | None = "length"
) -> list[TokenOut]:
    """The tokens that an engine reports for a choice; the last one carries `finish`."""
    last = len(ids) - 1
    return [
        TokenOut(
            request.id,
            request.attempt,
            choice,
            offset,
            id,
            finish=finish if offset == last else None,
            stop_id=id if offset == last and finish == "stop" else None,
        )
        for offset, id in enumerate(ids)
    ]


@dataclass
class Reader:
    """A router's record of one request. Deltas must arrive in order, complete and only once."""

    request: Request
    outputs: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ends: dict[int, tuple[str, str | int | None]] = field(default_factory=dict)
    stats: int = 0

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.request.params.n)]
        self.texts = [""] * self.request.params.n

    def read(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            assert delta.choice not in self.ends, "a delta after the last one"
            assert delta.offset == len(self.outputs[delta.choice])
            self.outputs[delta.choice] += delta.ids
            self.texts[delta.choice] += delta.text
            self.stats += delta.stats is not None
            if delta.finish is not None:
                self.ends[delta.choice] = (delta.finish, delta.stop)

    @property
    def finished(self) -> bool:
        return len(self.ends) == self.request.params.n

    def job(self, attempt: int = 1) -> RunJob:
        """The job that the router would send now."""
        outputs = tuple(tuple(ids) for ids in self.outputs)
        request = msgspec.structs.replace(self.request, attempt=attempt, outputs=outputs)
        return RunJob(request, finished=tuple(self.ends))


def open_job(node: TableNode, job: RunJob | PrefillJob) -> FakeLink:
    link = FakeLink()
    assert not node.table.resume_job(job, link)
    node.table.open_request(job, link)
    return link


def prefill(request: Request) -> PrefillJob:
    return PrefillJob(request, NodeId("d"), Epoch("e"))


def lose_link(node: TableNode, link: FakeLink) -> None:
    link.broken = True
    node.table.orphan_requests(link)


def reconnect(node: TableNode, job: RunJob | PrefillJob) -> FakeLink:
    link = FakeLink()
    assert node.table.resume_job(job, link)
    return link


def metric_values(page: bytes) -> dict[str, float]:
    """A metrics page's values by sample name, without histogram buckets."""
    families = text_string_to_metric_families(page.decode())
    samples = (sample for family in families for sample in family.samples)
    return {sample.name: sample.value for sample in samples if "le" not in sample.labels}

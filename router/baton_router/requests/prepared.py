"""A request that is tokenized and hashed, and not placed yet."""

from __future__ import annotations

from dataclasses import dataclass

from baton_protocol.ids import BlockHash
from baton_protocol.policies import Ranking
from baton_protocol.request import Request
from baton_protocol.resume import ResumeState
from baton_protocol.store import Kind
from baton_router.nodes.model_offers import Serving
from baton_router.openai.answer_parsing import AnswerParsing


@dataclass(frozen=True, slots=True)
class Prepared:
    """`chunks` names the prompt's full chunks. Only nodes of `kind` can run the request. `deadline`
    is a time of the router's clock (None: no deadline). `wanted` is the model name from the client,
    if it sent one. If `fills` is True, the answer may use the rest of the context. `ranking` is the
    placement policy the client asked for. `parsing` parses the answer (None: plain text).
    `priority` orders the client's own requests; that of the request is for engines. `resumed` is
    what another router, or this one, did of the request before."""

    request: Request
    chunks: tuple[BlockHash, ...]
    serving: Serving
    wanted: str | None
    fills: bool
    ranking: Ranking | None = None
    deadline: float | None = None
    parsing: AnswerParsing | None = None
    priority: int = 0
    resumed: ResumeState | None = None

    @property
    def kind(self) -> Kind:
        return self.serving.kind

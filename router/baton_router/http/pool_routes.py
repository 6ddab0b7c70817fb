"""Routes about the router and its pool: models, health, readiness, metrics, pool state, and how a
request was served.

In: aiohttp requests. Out: JSON, and the metrics page. Errors are raised, and the middleware in
`app` formats them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from baton_protocol.errors import InvalidRequest
from baton_protocol.vllm_metrics import metric_names
from baton_router.anthropic.answers import ModelInfo, ModelPage
from baton_router.http.generation import GenerationRoutes
from baton_router.http.headers import VERSION_HEADER
from baton_router.http.json_response import json_response
from baton_router.http.media_types import JSON_TYPE, TEXT_TYPE
from baton_router.http.observers import CONTEXT, Observers
from baton_router.http.pool_status import RouterStatus, pool_status
from baton_router.http.readiness import Health, Readiness, all_nodes_readiness, not_ready, wants_all
from baton_router.http.server_info import VERSION, ServerLoad, Version
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.link_table import LinkTable
from baton_router.observability.explanation import encode_explanation
from baton_router.openai.answers import Model, ModelList
from baton_router.settings import RouterSettings

METRICS_TYPE = f"{TEXT_TYPE}; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRoutes:
    """`name` is the router's. `store_reachable` says whether the index answers; None before it was
    asked."""

    name: str
    settings: RouterSettings
    fleet: Fleet
    links: LinkTable
    store_reachable: Callable[[], bool | None]
    generation: GenerationRoutes
    observers: Observers
    started: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/ping", self.ping),
            web.post("/ping", self.ping),
            web.get("/version", self.version),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics_page),
            web.get("/pool", self.pool),
            web.get("/requests/{id}", self.explained),
        ]

    async def models(self, request: web.Request) -> web.Response:
        data = [self._model(name) for name in self.fleet.offers.names()]
        if VERSION_HEADER in request.headers:
            return json_response(ModelPage.of(data))
        return json_response(ModelList(object="list", data=data))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self.fleet.offers.names():
            raise self.fleet.offers.no_model(name)
        model = self._model(name)
        if VERSION_HEADER in request.headers:
            return json_response(ModelInfo.of(model))
        return json_response(model)

    async def health(self, request: web.Request) -> web.Response:
        return json_response(Health(status="ok"))

    async def ready(self, request: web.Request) -> web.Response:
        reason, all_nodes = self.generation.why_unready(), wants_all(request)
        answer = Readiness(ready=reason is None, reason=reason or "")
        if all_nodes:
            late = not_ready(self.fleet.view, self.links.links.values(), self.settings.expect_nodes)
            answer = all_nodes_readiness(reason, late)
        return json_response(answer, status=200 if answer.ready else 503)

    async def ping(self, request: web.Request) -> web.Response:
        """As `ready` about the pool: SageMaker sends requests once this is 200."""
        reason = self.generation.why_unready()
        answer = Readiness(ready=reason is None, reason=reason or "")
        return json_response(answer, status=200 if answer.ready else 503)

    async def version(self, request: web.Request) -> web.Response:
        return json_response(Version(version=VERSION))

    async def load(self, request: web.Request) -> web.Response:
        return json_response(ServerLoad(server_load=self.generation.answering))

    async def metrics_page(self, request: web.Request) -> web.Response:
        try:
            names = metric_names(request.query.getall("names", []))
        except ValueError as error:
            raise InvalidRequest(str(error), param="names") from error
        page = self.observers.vllm.page if names == "vllm" else self.observers.metrics.page
        return web.Response(body=page(), headers={"Content-Type": METRICS_TYPE})

    async def pool(self, request: web.Request) -> web.Response:
        own = RouterStatus(
            pool=self.settings.pool,
            router=self.name,
            model=next(iter(self.fleet.offers.names()), None),
            links=self.links,
            has_store=bool(self.settings.index_url),
            store_reachable=self.store_reachable(),
            running=len(self.generation.dispatcher.in_flight),
        )
        return json_response(pool_status(self.fleet.view, own))

    async def explained(self, request: web.Request) -> web.Response:
        reader = request[CONTEXT].tenant
        assert reader is not None, "the middleware sets the tenant"
        explanation = self.observers.explanations.find(request.match_info["id"], reader)
        return web.Response(body=encode_explanation(explanation), content_type=JSON_TYPE)

    def _model(self, name: str) -> Model:
        offers = self.fleet.offers
        lengths = [serving.max_model_len for serving in offers.current() if name in serving.names]
        written = [
            serving.made
            for serving in offers.current_or_last()
            if name in serving.names and serving.made
        ]
        tasks = [s.kind.pooling for s in offers.current_or_last() if name in s.names]
        return Model(
            id=name,
            object="model",
            created=min(written, default=self.started),
            owned_by="baton",
            max_model_len=min(lengths, default=None),
            task=(tasks and tasks[0]) or "generate",
        )

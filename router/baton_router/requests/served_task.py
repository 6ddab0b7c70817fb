"""Whether a model answers the kind of call that it is asked: it generates, embeds or classifies.

In: a call, and the model that would serve it. Out: the parameters of its pooling requests (None: it
generates), or an error that names the routes of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_protocol.errors import InvalidRequest
from baton_protocol.pooling import Pooling, PoolingParams
from baton_router.nodes.model_offers import Serving
from baton_router.openai.call import Call

# What a model does, and what answers with it.
SERVES: Mapping[Pooling, tuple[str, str]] = {
    "": ("generates text", "/v1/chat/completions and /v1/completions"),
    "embed": ("makes vectors of texts", "/v1/embeddings, /score and /rerank"),
    "classify": ("classifies texts", "/score and /rerank"),
}


def pooling_of(call: Call, serving: Serving) -> PoolingParams | None:
    """What the call's requests ask of the model. Raise InvalidRequest."""
    task = serving.kind.pooling
    if task not in call.tasks:
        does, routes = SERVES[task]
        wanted = " or ".join(SERVES[other][0] for other in call.tasks)
        raise InvalidRequest(
            f"model {serving.name!r} {does}, but this route needs one that {wanted}; it answers"
            f" {routes}",
            param="model",
            code="wrong_task",
        )
    return call.tasks[task]

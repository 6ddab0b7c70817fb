"""The operations of the OpenAPI document: a row for each route of the application. A test checks
that.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_protocol.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from baton_protocol.vllm_metrics import METRIC_NAMES
from baton_router.anthropic.answers import (
    CountedTokens,
    Message,
    MessageEvent,
    MessagesError,
    ModelInfo,
    ModelPage,
)
from baton_router.anthropic.fields import COUNT_ROUTE
from baton_router.anthropic.fields import ROUTE as MESSAGES_ROUTE
from baton_router.batches.records import Batch, BatchList, FileDeleted, FileList, FileObject
from baton_router.http.batch_routes import (
    BATCHES_PATH,
    USUALLY_LISTED,
)
from baton_router.http.batch_routes import (
    MOST_LISTED as MOST_BATCHES,
)
from baton_router.http.drain import NodeDrain
from baton_router.http.file_routes import FILES_PATH, MOST_LISTED, PURPOSES
from baton_router.http.live_routes import LIVE_PATH
from baton_router.http.media_types import HTML_TYPE
from baton_router.http.node_sleep import NodeSleep
from baton_router.http.openapi_operation import (
    ANY,
    GENERATION,
    KEYED,
    PARAMETERS,
    STORED,
    WITH_BODY,
    Json,
    OpenAPIOperation,
)
from baton_router.http.page_routes import PAGE_PATH
from baton_router.http.pool_records import Pool
from baton_router.http.prefix_cache import RESET_PATH, CacheReset
from baton_router.http.prefixes import PREFIXES_PATH, Prefix, PrefixList
from baton_router.http.readiness import Health, Readiness
from baton_router.http.responses import CANCEL as CANCEL_RESPONSE
from baton_router.http.responses import INPUT_ITEMS, INPUT_TOKENS
from baton_router.http.responses import ONE as ONE_RESPONSE
from baton_router.http.resumes import EVENTS_PATH
from baton_router.http.server_info import ServerLoad, Version
from baton_router.http.token_routes import (
    CHAT_RENDER,
    COMPLETIONS_RENDER,
    DETOKENIZE,
    TOKENIZE,
    TOKENIZER_INFO,
    Detokenized,
    RenderedPrompt,
    Tokenized,
)
from baton_router.live.records import Snapshot
from baton_router.observability.explanation import Explanation
from baton_router.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Model,
    ModelList,
)
from baton_router.openai.fields.batch_chat import BatchChatFields
from baton_router.pooling.answers import EmbeddingList, Ranking, ScoreList
from baton_router.pooling.embeddings import EMBEDDINGS
from baton_router.pooling.rerank import RERANK, RERANKS
from baton_router.pooling.score import SCORE, SCORES
from baton_router.responses.call import RESPONSES
from baton_router.responses.events import ResponseEvent
from baton_router.responses.records import DeletedResponse, InputItemList, InputTokens, Response
from baton_router.tokens.generate import Generated, GeneratedChunk
from baton_router.tokens.generate_fields import GenerateFields
from baton_router.tokens.scoring import LabelScores
from baton_router.tokens.scoring_fields import ScoringFields

ALL_NODES: Json = {
    "description": "Check every node, and list those that are not ready.",
    "schema": {"type": "string", "enum": ["1", "true", "0", "false"], "default": "0"},
}
WHOSE_NAMES: Json = {
    "description": "Whose names the metrics have.",
    "schema": {"type": "string", "enum": list(METRIC_NAMES), "default": METRIC_NAMES[0]},
}
NO_EFFECT: Json = {
    "description": "No effect: running requests do not hinder a reset.",
    "schema": {"type": "string", "enum": ["true", "false"], "default": "false"},
}
WHOSE_TOKENIZER: Json = {
    "description": PARAMETERS["model"],
    "schema": {"type": "string"},
}
NOT_SERVED: Json = {
    "description": "Whether to clear the KV store, which is not supported.",
    "schema": {"type": "string", "enum": ["false"], "default": "false"},
}
ITEMS_LIMIT: Json = {
    "description": "The number of items.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
}
ITEMS_ORDER: Json = {
    "description": "The order of the items.",
    "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
}
AFTER: Json = {
    "description": "The id of the last item of the page before.",
    "schema": {"type": "string"},
}


def _one_of(description: str, values: Sequence[str]) -> Json:
    return {"description": description, "schema": {"type": "string", "enum": list(values)}}


def _limit(most: int, usual: int) -> Json:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": usual}
    return {"description": "Number of items of the page.", "schema": schema}


OPERATIONS = (
    OpenAPIOperation(
        method="POST",
        path="/v1/chat/completions",
        tag="generation",
        summary="Answer a conversation",
        description="Generates the next message of a conversation, rendered with the model's chat "
        "template. With `stream` the answer is a sequence of server-sent events, and "
        "the schema is that of one event.",
        answers={200: ChatCompletion},
        errors=GENERATION,
        body="ChatRequest",
        event=ChatCompletionChunk,
    ),
    OpenAPIOperation(
        method="POST",
        path=BatchChatFields.ROUTE,
        tag="generation",
        summary="Answer several conversations",
        description="Generates the next message of each conversation of a list. The choices are in "
        "the order of the conversations.",
        answers={200: ChatCompletion},
        errors=GENERATION,
        body="BatchChatRequest",
    ),
    OpenAPIOperation(
        method="POST",
        path="/v1/completions",
        tag="generation",
        summary="Continue one or several prompts",
        description="Generates the continuation of a prompt, or of each prompt of a list. With "
        "`stream` the answer is a sequence of server-sent events, and the schema "
        "is that of one event.",
        answers={200: Completion},
        errors=GENERATION,
        body="CompletionRequest",
        event=CompletionChunk,
    ),
    OpenAPIOperation(
        method="POST",
        path=MESSAGES_ROUTE,
        tag="generation",
        summary="Answer a conversation of Anthropic's API",
        description="Generates the next message of a conversation, in the form of Anthropic's "
        "Messages API. With `stream` the answer is a sequence of server-sent events, each with the "
        "name of its type, and the schema is that of one event.",
        answers={200: Message},
        errors=GENERATION,
        body="MessagesRequest",
        event=MessageEvent,
        failure=MessagesError,
    ),
    OpenAPIOperation(
        method="POST",
        path=COUNT_ROUTE,
        tag="tokens",
        summary="The number of tokens of a conversation of Anthropic's API",
        description="Counts the tokens of the prompt that the same conversation would have, and "
        "generates nothing.",
        answers={200: CountedTokens},
        errors=WITH_BODY,
        body="CountTokensRequest",
        failure=MessagesError,
    ),
    OpenAPIOperation(
        method="POST",
        path=RESPONSES.route,
        tag="responses",
        summary="Answer a conversation of items",
        description="Generates the items that follow those of the input: reasoning, messages and "
        "calls. With `stream` the answer is a sequence of server-sent events, and the schema is "
        "that of one event.",
        answers={200: Response},
        errors=GENERATION,
        body="ResponseRequest",
        event=ResponseEvent,
    ),
    OpenAPIOperation(
        method="POST",
        path=INPUT_TOKENS,
        tag="responses",
        summary="Count the tokens of an input",
        description="The number of tokens of the prompt that the same body would have as a "
        "response.",
        answers={200: InputTokens},
        errors=WITH_BODY,
        body="InputTokensRequest",
    ),
    OpenAPIOperation(
        method="GET",
        path=ONE_RESPONSE,
        tag="responses",
        summary="Get a response",
        description="A response that is kept.",
        answers={200: Response},
        errors=(*KEYED, NotFound, Unavailable),
    ),
    OpenAPIOperation(
        method="DELETE",
        path=ONE_RESPONSE,
        tag="responses",
        summary="Delete a response",
        description="The response is no longer kept.",
        answers={200: DeletedResponse},
        errors=(*KEYED, NotFound, Unavailable),
    ),
    OpenAPIOperation(
        method="POST",
        path=CANCEL_RESPONSE,
        tag="responses",
        summary="Cancel a response",
        description="Stops a response that is made in the background. One that has ended stays as "
        "it is.",
        answers={200: Response},
        errors=(*KEYED, NotFound, Unavailable),
    ),
    OpenAPIOperation(
        method="GET",
        path=INPUT_ITEMS,
        tag="responses",
        summary="List the input of a response",
        description="Lists the items that a kept response answers, with those of the responses "
        "before it.",
        answers={200: InputItemList},
        errors=(*KEYED, NotFound, Unavailable),
        query={"limit": ITEMS_LIMIT, "order": ITEMS_ORDER},
    ),
    OpenAPIOperation(
        method="POST",
        path=GenerateFields.ROUTE,
        tag="generation",
        summary="Generate ids from ids",
        description="Generates the ids that follow those of a prompt. Takes what the render routes "
        "answer. With `stream` the answer is a sequence of server-sent events, and the schema is "
        "that of one event.",
        answers={200: Generated},
        errors=GENERATION,
        body="GenerateRequest",
        event=GeneratedChunk,
    ),
    OpenAPIOperation(
        method="POST",
        path=ScoringFields.ROUTE,
        tag="generation",
        summary="Score items by the probability of a label",
        description="For each item, the probability that the first label is the next token after "
        "the query and the item, among the labels or among all tokens.",
        answers={200: LabelScores},
        errors=GENERATION,
        body="ScoringRequest",
    ),
    OpenAPIOperation(
        method="POST",
        path=EMBEDDINGS.route,
        tag="pooling",
        summary="Vectors of texts",
        description="Makes a vector of a text, or of each text of a list. The model must be one "
        "that embeds.",
        answers={200: EmbeddingList},
        errors=GENERATION,
        body="EmbeddingRequest",
    ),
    *(
        OpenAPIOperation(
            method="POST",
            path=dialect.route,
            tag="pooling",
            summary="Scores of pairs of texts",
            description="Tells how similar the two texts of each pair are. The model must be one"
            " that embeds, or a classifier with one class.",
            answers={200: ScoreList},
            errors=GENERATION,
            body="ScoreRequest",
            alias=dialect is not SCORE,
        )
        for dialect in SCORES
    ),
    *(
        OpenAPIOperation(
            method="POST",
            path=dialect.route,
            tag="pooling",
            summary="Rank documents",
            description="Orders documents by their relevance to a query. The model must be one that"
            " embeds, or a classifier with one class.",
            answers={200: Ranking},
            errors=GENERATION,
            body="RerankRequest",
            alias=dialect is not RERANK,
        )
        for dialect in RERANKS
    ),
    OpenAPIOperation(
        method="POST",
        path=FILES_PATH,
        tag="batches",
        summary="Upload a file",
        description="Stores the input of a batch: JSON lines, each with `custom_id`, `method`, "
        "`url` and `body`.",
        answers={200: FileObject},
        errors=WITH_BODY,
        body="FileRequest",
        form=True,
    ),
    OpenAPIOperation(
        method="GET",
        path=FILES_PATH,
        tag="batches",
        summary="List the files",
        description="Lists the tenant's files, the newest first.",
        answers={200: FileList},
        errors=STORED,
        query={
            "purpose": _one_of("Only files with this purpose.", PURPOSES),
            "limit": _limit(MOST_LISTED, MOST_LISTED),
            "order": _one_of("By time of creation.", ("asc", "desc")),
            "after": AFTER,
        },
    ),
    OpenAPIOperation(
        method="GET",
        path=f"{FILES_PATH}/{{id}}",
        tag="batches",
        summary="Get a file",
        description="Describes one file.",
        answers={200: FileObject},
        errors=STORED,
    ),
    OpenAPIOperation(
        method="GET",
        path=f"{FILES_PATH}/{{id}}/content",
        tag="batches",
        summary="Read a file",
        description="The bytes of one file.",
        answers={200: bytes},
        errors=STORED,
    ),
    OpenAPIOperation(
        method="DELETE",
        path=f"{FILES_PATH}/{{id}}",
        tag="batches",
        summary="Delete a file",
        description="Deletes one file. A batch that still reads it fails.",
        answers={200: FileDeleted},
        errors=STORED,
    ),
    OpenAPIOperation(
        method="POST",
        path=BATCHES_PATH,
        tag="batches",
        summary="Queue a batch",
        description="The requests of a file run when the pool has room. Their answers are in the "
        "batch's output file, and errors in its error file.",
        answers={200: Batch},
        errors=WITH_BODY,
        body="BatchRequest",
    ),
    OpenAPIOperation(
        method="GET",
        path=BATCHES_PATH,
        tag="batches",
        summary="List the batches",
        description="Lists the tenant's batches, the newest first.",
        answers={200: BatchList},
        errors=STORED,
        query={"limit": _limit(MOST_BATCHES, USUALLY_LISTED), "after": AFTER},
    ),
    OpenAPIOperation(
        method="GET",
        path=f"{BATCHES_PATH}/{{id}}",
        tag="batches",
        summary="Get a batch",
        description="Describes one batch: its state, and how many of its requests have answers.",
        answers={200: Batch},
        errors=STORED,
    ),
    OpenAPIOperation(
        method="POST",
        path=f"{BATCHES_PATH}/{{id}}/cancel",
        tag="batches",
        summary="Cancel a batch",
        description="Ends the batch. Its output file has the answers so far.",
        answers={200: Batch},
        errors=WITH_BODY,
    ),
    OpenAPIOperation(
        method="POST",
        path=CHAT_RENDER,
        tag="tokens",
        summary="The prompt of a conversation",
        description="Renders and tokenizes the prompt that the same body would have as a chat, and "
        "generates nothing.",
        answers={200: RenderedPrompt},
        errors=WITH_BODY,
        body="ChatRequest",
    ),
    OpenAPIOperation(
        method="POST",
        path=COMPLETIONS_RENDER,
        tag="tokens",
        summary="The prompts of a completion",
        description="Tokenizes the prompts that the same body would have as a completion, and "
        "generates nothing.",
        answers={200: RenderedPrompt},
        errors=WITH_BODY,
        body="CompletionRequest",
        listed=True,
    ),
    OpenAPIOperation(
        method="POST",
        path=TOKENIZE,
        tag="tokens",
        summary="The tokens of a text or a conversation",
        description="Tokenizes a text, or a conversation rendered with the model's chat template. "
        "It may be longer than the model's context.",
        answers={200: Tokenized},
        errors=WITH_BODY,
        body="TokenizeRequest",
    ),
    OpenAPIOperation(
        method="POST",
        path=DETOKENIZE,
        tag="tokens",
        summary="The text of tokens",
        description="Decodes ids of tokens, special ones included.",
        answers={200: Detokenized},
        errors=WITH_BODY,
        body="DetokenizeRequest",
    ),
    OpenAPIOperation(
        method="GET",
        path=TOKENIZER_INFO,
        tag="tokens",
        summary="The tokenizer's configuration",
        description="The model's `tokenizer_config.json`, with its chat template.",
        answers={200: dict},
        errors=(*KEYED, NotFound, Unavailable),
        query={"model": WHOSE_TOKENIZER},
    ),
    OpenAPIOperation(
        method="GET",
        path="/v1/models",
        tag="models",
        summary="List the models",
        description="Lists the models that clients may name: one, or two while the pool rolls "
        "out another. A request with the header `anthropic-version` gets Anthropic's form.",
        answers={200: ModelList | ModelPage},
        errors=KEYED,
    ),
    OpenAPIOperation(
        method="GET",
        path="/v1/models/{model}",
        tag="models",
        summary="Get a model",
        description="Describes one model of the list, in the same form.",
        answers={200: Model | ModelInfo},
        errors=(*KEYED, NotFound),
    ),
    OpenAPIOperation(
        method="GET",
        path="/health",
        tag="health",
        summary="Is the router alive?",
        description="Answers 200 while the router's process runs.",
        answers={200: Health},
    ),
    OpenAPIOperation(
        method="GET",
        path="/ready",
        tag="health",
        summary="Can the router serve a request now?",
        description="Answers 200 if the router can serve a request now, else 503 with the "
        "reason. With `all`, answers 200 only if every known node is ready too.",
        answers={200: Readiness, 503: Readiness},
        query={"all": ALL_NODES},
    ),
    *(
        OpenAPIOperation(
            method=method,
            path="/ping",
            tag="health",
            summary="Can the router serve a request now? (SageMaker)",
            description="As `/ready` without `all`.",
            answers={200: Readiness, 503: Readiness},
        )
        for method in ("GET", "POST")
    ),
    OpenAPIOperation(
        method="GET",
        path="/version",
        tag="health",
        summary="Baton's version",
        description="The version of the router.",
        answers={200: Version},
    ),
    OpenAPIOperation(
        method="GET",
        path="/load",
        tag="operations",
        summary="Number of requests that are being answered",
        description="Counts the generation requests of this router that are held, queued, running "
        "or being written.",
        answers={200: ServerLoad},
        errors=KEYED,
    ),
    OpenAPIOperation(
        method="GET",
        path="/metrics",
        tag="operations",
        summary="Metrics",
        description="The router's metrics in Prometheus' text format.",
        answers={200: None},
        errors=KEYED,
        query={"names": WHOSE_NAMES},
    ),
    OpenAPIOperation(
        method="GET",
        path="/pool",
        tag="operations",
        summary="State of the pool",
        description="Lists the pool's nodes with their state, load and caches, and sums up the KV "
        "store and all requests.",
        answers={200: Pool},
        errors=KEYED,
    ),
    OpenAPIOperation(
        method="GET",
        path=LIVE_PATH,
        tag="operations",
        summary="What runs in the pool now",
        description="Sends an event `snapshot` per second, until the client leaves or the router"
        " shuts down. An admin's key, or none in a pool without keys, gets all of it. A tenant's "
        "key gets the tenant's own requests, and id, role and state of nodes.",
        answers={200: str},
        errors=(*KEYED, Unavailable),
        sent=("snapshot", Snapshot),
    ),
    OpenAPIOperation(
        method="GET",
        path="/",
        tag="operations",
        summary="The live page",
        description="A page for browsers. A router with `--no-page` has none.",
        answers={200: bytes},
        media=HTML_TYPE,
    ),
    OpenAPIOperation(
        method="GET",
        path=PAGE_PATH,
        tag="operations",
        summary="A file of the live page",
        description="A script, a style sheet or a picture of the page.",
        answers={200: bytes},
        errors=(*ANY, NotFound),
        media="*/*",
    ),
    OpenAPIOperation(
        method="GET",
        path="/requests/{id}",
        tag="requests",
        summary="How a request was served",
        description="Shows where a request was placed and why, what each attempt did, and how "
        "long it took. The router knows its running requests and the latest ended "
        "ones.",
        answers={200: Explanation},
        errors=(*KEYED, NotFound),
    ),
    OpenAPIOperation(
        method="GET",
        path=EVENTS_PATH,
        tag="requests",
        summary="The rest of a stream",
        description="Sends a stream that was requested with the header `x-baton-resume`, from any "
        "router of the pool: what follows the event in `Last-Event-ID`, or all of it.",
        answers={200: str},
        errors=(*KEYED, NotFound, Unavailable),
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/drain",
        tag="operations",
        summary="Drain a node",
        description="The node takes no new requests; its running requests end there or move to "
        "another node. The router answers once the node drains.",
        answers={200: NodeDrain},
        errors=WITH_BODY,
        body="DrainRequest",
        body_required=False,
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/resume",
        tag="operations",
        summary="Resume a node",
        description="Undoes a drain. The router answers once the node takes requests again.",
        answers={200: NodeDrain},
        errors=WITH_BODY,
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/sleep",
        tag="operations",
        summary="Put a node to sleep",
        description="The node drains, and its engine gives its memory back until an operator wakes"
        " it. The router answers once it sleeps.",
        answers={200: NodeSleep},
        errors=WITH_BODY,
        body="SleepRequest",
        body_required=False,
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/wake",
        tag="operations",
        summary="Wake a node up",
        description="Its engine takes its memory again. The router answers once it has it.",
        answers={200: NodeSleep},
        errors=WITH_BODY,
        body="WakeRequest",
        body_required=False,
    ),
    OpenAPIOperation(
        method="POST",
        path=RESET_PATH,
        tag="operations",
        summary="Reset the prefix caches",
        description="All nodes forget the KV in their prefix caches. Running requests go on; the KV"
        " store is not cleared.",
        answers={200: CacheReset},
        errors=(*KEYED, Forbidden, InvalidRequest),
        query={"reset_running_requests": NO_EFFECT, "reset_external": NOT_SERVED},
    ),
    OpenAPIOperation(
        method="POST",
        path=PREFIXES_PATH,
        tag="operations",
        summary="Pin a prefix",
        description="All nodes keep the KV of a prompt in their caches for some time. Beside the"
        " fields of the schema, the body has those of a ChatRequest or of a CompletionRequest, of"
        " which the prompt counts. The router answers once a node has begun to load it.",
        answers={200: Prefix},
        errors=WITH_BODY,
        body="PrefixRequest",
    ),
    OpenAPIOperation(
        method="GET",
        path=PREFIXES_PATH,
        tag="operations",
        summary="List the pinned prefixes",
        description="Lists the pinned prefixes, and which nodes have them.",
        answers={200: PrefixList},
        errors=KEYED,
    ),
    OpenAPIOperation(
        method="DELETE",
        path=f"{PREFIXES_PATH}/{{id}}",
        tag="operations",
        summary="Unpin a prefix",
        description="Nodes may evict the prefix from now on. Answers with what it was.",
        answers={200: Prefix},
        errors=(*KEYED, NotFound),
    ),
    OpenAPIOperation(
        method="GET",
        path="/openapi.json",
        tag="health",
        summary="This document",
        description="This OpenAPI 3.1 document.",
        answers={200: dict},
    ),
)

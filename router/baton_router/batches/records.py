"""The JSON of files and batches: what clients get, and what the store keeps.

Clients get OpenAI's objects. The facts of a batch are records of their own, each written once, so
that routers that work on one batch at the same time cannot undo each other's.
"""

from __future__ import annotations

from typing import Literal

from baton_router.openai.answers import Closed

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
# How a batch can end.
EndStatus = Literal["failed", "completed", "expired", "cancelled"]


class FileObject(Closed):
    """A file. Times are in Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"]


class FileList(Closed):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Closed):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Closed):
    """Why a batch failed. `line` is the number of the input's line, from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Closed):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Closed):
    """Lines of the input, and those of them that are answered, by outcome."""

    total: int
    completed: int
    failed: int


class Batch(Closed):
    """A batch. Times are in Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Closed):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


# --- what the store keeps of a batch --------------------------------------------------------------


class BatchOrder(Closed):
    """What the client asked for. `output_ttl_s` is the lifetime of the files with its answers."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    input_bytes: int
    completion_window: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    output_ttl_s: int


class BatchMoment(Closed):
    """When a batch began to be answered, to be cancelled or to be finished. `total` counts the
    lines of its input; 0 where that is not the moment's matter."""

    at: int
    total: int = 0


class BatchEnd(Closed):
    """How a batch ended."""

    status: EndStatus
    at: int
    counts: RequestCounts
    output: FileObject | None = None
    error: FileObject | None = None
    errors: tuple[BatchError, ...] = ()

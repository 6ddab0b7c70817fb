"""Opens the store that `--file-store` names: a folder, or a bucket."""

from __future__ import annotations

from baton_router.batches.folder_store import FolderStore
from baton_router.batches.object_store import ObjectStore
from baton_router.errors import StartError

BUCKET = "s3://"


def open_store(where: str) -> ObjectStore:
    """Raise StartError if it cannot be used."""
    if not where.startswith(BUCKET):
        return FolderStore(where)
    try:
        from baton_router.batches.bucket_store import BucketStore
    except ImportError:
        raise StartError(
            f"--file-store {where}: buckets need obstore: pip install '.[s3]' in the checkout"
        ) from None
    return BucketStore(where)

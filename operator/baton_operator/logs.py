"""kopf's log lines in the format of our own.

In: kopf's log records. Out: the same records through the root logger's handlers, with the resource
as `object`, without kopf's settings objects, and without a line per handled event.
"""

from __future__ import annotations

import logging

_NOISY = ("kopf.objects", "kopf.activities")


def tame_kopf() -> None:
    """Call once per process."""
    for name in _NOISY:
        logger = logging.getLogger(name)
        logger.setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("kopf.objects").addFilter(_plain)


def _plain(record: logging.LogRecord) -> bool:
    for name in ("settings", "k8s_skip"):
        vars(record).pop(name, None)
    reference = vars(record).pop("k8s_ref", None)
    if reference is not None:
        record.object = f"{reference['kind']} {reference['namespace']}/{reference['name']}"
    return True

"""What each tenant may: its share where requests wait, and its budgets per minute.

In: a TOML file. Out: one TenantLimits per tenant; who is not named has the defaults.

    [defaults]
    requests_per_minute = 60

    [tenants.acme]
    weight = 2
    priority = 10
    requests_per_minute = 600
    tokens_per_minute = 100_000
    max_queued = 100
    max_call_sequences = 256
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton_router.errors import StartError

_WHERE = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where requests wait, all of a higher `priority` go first, and tenants of one priority share
    by `weight`. Per minute 0 is unbounded; so much of it as comes in `burst_seconds` may be used at
    once; each prompt of a call is a request. Of its calls at most `max_queued` wait to begin, and
    each may ask for `max_call_sequences` (None: as many as of all)."""

    weight: float = 1.0
    priority: int = 0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    burst_seconds: float = 3.0
    max_queued: int | None = None
    max_call_sequences: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight:g}; it must be above 0")
        if not -100 <= self.priority <= 100:
            raise ValueError(f"priority is {self.priority}; use -100 to 100")
        for name in ("requests_per_minute", "tokens_per_minute", "max_queued"):
            value = getattr(self, name) or 0
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value:g}; it must be 0 or more")
        if self.max_call_sequences is not None and self.max_call_sequences < 1:
            raise ValueError(f"max_call_sequences is {self.max_call_sequences}; use 1 or more")
        if not 0 < self.burst_seconds <= 3600:
            raise ValueError(f"burst_seconds is {self.burst_seconds:g}; use above 0, up to 3600")


class Limits:
    """What one file says."""

    def __init__(
        self, defaults: TenantLimits | None = None, tenants: Mapping[str, TenantLimits] = {}
    ) -> None:
        self._defaults = defaults or TenantLimits()
        self._tenants = dict(tenants)
        self.names = frozenset(tenants)

    def of(self, tenant: str) -> TenantLimits:
        return self._tenants.get(tenant, self._defaults)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    defaults: dict[str, Any] = {}
    tenants: dict[str, dict[str, Any]] = {}


def read_limits(path: str) -> Limits:
    """Of no file those of nobody. Raise StartError: one line that names the place in the file."""
    if not path:
        return Limits()
    try:
        found = msgspec.convert(tomllib.loads(Path(path).read_text("utf-8-sig")), _File)
    except OSError as error:
        raise StartError(f"--tenants {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise StartError(f"--tenants {path} is no text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise StartError(f"--tenants {path} is no TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise StartError(f"--tenants {path}: {_describe(error)}") from None
    defaults = _limits(path, "defaults", found.defaults)
    return Limits(
        defaults,
        {
            name: _limits(path, f"tenants.{name}", found.defaults | fields)
            for name, fields in found.tenants.items()
        },
    )


def _limits(path: str, table: str, fields: dict[str, Any]) -> TenantLimits:
    try:
        return msgspec.convert(fields, TenantLimits)
    except msgspec.ValidationError as error:
        raise StartError(f"--tenants {path}, [{table}]: {_describe(error)}") from None


def _describe(error: msgspec.ValidationError) -> str:
    found = _WHERE.match(str(error))
    if found is None:
        return str(error)
    return f"{found[2]}: {found[1]}" if found[2] else found[1]

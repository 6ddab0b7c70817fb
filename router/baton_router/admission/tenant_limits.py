"""LimitsByTenant of tenants: weight and priority in the queue, and budgets per minute.

In: a TOML file. Out: one TenantLimits per tenant; tenants it does not name get the defaults.

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
from collections.abc import Mapping
from typing import Any

import msgspec

from baton_protocol.errors import exact
from baton_router.errors import StartError
from baton_router.toml_file import read_toml

_WHERE = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LimitsByTenant of one tenant.

    Waiting calls of a higher `priority` go first; tenants of equal priority share by `weight`. A
    rate per minute of 0 is unlimited; a tenant may use up to `burst_seconds` of its rate at once.
    Each prompt of a call counts as a request. At most `max_queued` of its calls wait to start, and
    a call may ask for `max_call_sequences` sequences (None: only the router's limits)."""

    weight: float = 1.0
    priority: int = 0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    burst_seconds: float = 3.0
    max_queued: int | None = None
    max_call_sequences: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {exact(self.weight)}; it must be above 0")
        if not -100 <= self.priority <= 100:
            raise ValueError(f"priority is {self.priority}; use -100 to 100")
        for name in ("requests_per_minute", "tokens_per_minute", "max_queued"):
            value = getattr(self, name) or 0
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {exact(value)}; it must be 0 or more")
        if self.max_call_sequences is not None and self.max_call_sequences < 1:
            raise ValueError(f"max_call_sequences is {self.max_call_sequences}; use 1 or more")
        if not 0 < self.burst_seconds <= 3600:
            given = exact(self.burst_seconds)
            raise ValueError(f"burst_seconds is {given}; use above 0, up to 3600")


class LimitsByTenant:
    """The limits from one file."""

    def __init__(
        self, defaults: TenantLimits | None = None, tenants: Mapping[str, TenantLimits] = {}
    ) -> None:
        self._defaults = defaults or TenantLimits()
        self._tenants = dict(tenants)
        self.names = frozenset(tenants)

    def of_tenant(self, tenant: str) -> TenantLimits:
        return self._tenants.get(tenant, self._defaults)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    defaults: dict[str, Any] = {}
    tenants: dict[str, dict[str, Any]] = {}


def read_limits(path: str) -> LimitsByTenant:
    """Read the file; "" gives the defaults. Raise StartError with one line naming the place."""
    if not path:
        return LimitsByTenant()
    try:
        config = msgspec.convert(read_toml("--tenants", path), _File)
    except msgspec.ValidationError as error:
        raise StartError(f"--tenants {path}: {_file_error(error)}") from None
    defaults = _limits(path, "defaults", config.defaults)
    return LimitsByTenant(
        defaults,
        {
            name: _limits(path, f"tenants.{name}", config.defaults | fields)
            for name, fields in config.tenants.items()
        },
    )


def _limits(path: str, table: str, fields: dict[str, Any]) -> TenantLimits:
    try:
        return msgspec.convert(fields, TenantLimits)
    except msgspec.ValidationError as error:
        raise StartError(f"--tenants {path}, [{table}]: {_file_error(error)}") from None


def _file_error(error: msgspec.ValidationError) -> str:
    match = _WHERE.match(str(error))
    if match is None:
        return str(error)
    return f"{match[2]}: {match[1]}" if match[2] else match[1]

"""Counts the calls and tokens of this router, by tenant and model.

In: calls as they end, and the `usage` of answers. Out: the router's entry in the pool's books, with
everything since its start.
"""

from __future__ import annotations

import msgspec

from baton_protocol.usage import MAX_TENANTS, OTHER_TENANTS, TokenRow, UsageEntry

MAX_MODELS = 7  # per tenant; a router has few names of models, and later ones share OTHER_MODELS
OTHER_MODELS = "(other)"


class Account(msgspec.Struct):
    """The fields of TokenRow that count."""

    calls: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class UsageCounter:
    """`name` is the router's, unique to this start."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tenants: dict[str, dict[str, Account]] = {}

    def count_call(self, tenant: str, model: str, *, error: bool) -> None:
        """A call has ended, with an error or not. `model` is "" if none was chosen."""
        account = self._account(tenant, model)
        account.calls += 1
        account.errors += error

    def count_tokens(
        self, tenant: str, model: str, prompt: int, cached: int, completion: int
    ) -> None:
        """What one answer's `usage` says, or that of a call that ended early."""
        account = self._account(tenant, model)
        account.prompt_tokens += prompt
        account.cached_tokens += cached
        account.completion_tokens += completion

    def entry(self) -> UsageEntry:
        rows = tuple(
            TokenRow(tenant, model, *msgspec.structs.astuple(account))
            for tenant, models in self._tenants.items()
            for model, account in models.items()
        )
        return UsageEntry(name=self._name, tokens=rows)

    def _account(self, tenant: str, model: str) -> Account:
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        models = self._tenants.setdefault(tenant, {})
        if model not in models and len(models) >= MAX_MODELS:
            model = OTHER_MODELS
        account = models.get(model)
        if account is None:
            account = models[model] = Account()
        return account

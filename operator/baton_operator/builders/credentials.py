"""The pool's own secrets, its Secret, and the variables that pods get from a Secret.

The secrets (`Credentials`) are created once from random bytes, and read back from the pool's
Secret. Only that Secret's manifest contains their values; everything else refers to its keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from baton_operator.api.pool import Credentials, Pool
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.names import TOKEN_KEY

PASSWORD_KEY = "redis-password"
ACL_KEY = "users.acl"
TENANT_KEY = "tenant-secret"
SECRET_BYTES = 32
_HEX = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}".encode())


def new_credentials(random: Callable[[int], bytes]) -> Credentials:
    """`random` returns that many unpredictable bytes, as os.urandom does."""
    return Credentials(
        redis_password=random(SECRET_BYTES).hex(),
        link_token=random(SECRET_BYTES).hex(),
        tenant_secret=random(SECRET_BYTES).hex(),
    )


def credentials_of(
    secret: Mapping[str, Any] | None,
    random: Callable[[int], bytes],
    last: Credentials | None = None,
) -> Credentials | None:
    """The credentials in the Secret; None if it is missing or invalid. A Secret without a tenant
    secret keeps its other values and gets the `last` tenant secret, because tenants would not find
    their stored KV with another one. It gets a new one if it is older than tenant secrets."""
    data = (secret or {}).get("data") or {}
    password, token = _secret_text(data.get(PASSWORD_KEY)), _secret_text(data.get(TOKEN_KEY))
    if password is None or token is None:
        return None
    tenants = _secret_text(data.get(TENANT_KEY))
    if tenants is None:
        tenants = last.tenant_secret if last is not None else random(SECRET_BYTES).hex()
    return Credentials(redis_password=password, link_token=token, tenant_secret=tenants)


def build_secret(pool: Pool) -> Manifest:
    """Keys in `data`, where they are read back from: stringData would be owned and never seen."""
    values = {
        PASSWORD_KEY: pool.credentials.redis_password,
        ACL_KEY: acl_file(pool.credentials.redis_password),
        TOKEN_KEY: pool.credentials.link_token,
        TENANT_KEY: pool.credentials.tenant_secret,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": ChildIdentity(pool, "auth").metadata(),
        "type": "Opaque",
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in values.items()},
    }


def acl_file(password: str) -> str:
    """Redis' ACL file: one user, with all rights and this password, which Redis keeps as a hash."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default on #{digest} ~* &* +@all\n"


def secret_variable(
    variable: str, secret: str, key: str, *, optional: bool = False
) -> dict[str, Any]:
    """A variable that the kubelet sets from a Secret."""
    reference: dict[str, Any] = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def link_token_variable(pool: Pool) -> dict[str, Any]:
    """The token with which routers and nodes authenticate each other."""
    return secret_variable("BATON_LINK_TOKEN", ChildIdentity(pool, "auth").name, TOKEN_KEY)


def tenant_secret_variable(pool: Pool) -> dict[str, Any]:
    """The secret from which routers derive tenants' salts."""
    return secret_variable("BATON_TENANT_SECRET", ChildIdentity(pool, "auth").name, TENANT_KEY)


def _secret_text(encoded: Any) -> str | None:
    if not isinstance(encoded, str):
        return None
    try:
        text = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    return text.decode() if _HEX.fullmatch(text) else None

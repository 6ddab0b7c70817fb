"""Authentication: API keys, their tenants, and the salts that separate tenants' KV.

In: a file of keys; a request's Authorization header and its client's address. Out: the Tenant, or a
401 or 403 error. Keys are stored and looked up as SHA-256 digests, and no message contains one.

    # one key per line; a tenant may have several; `admin` also opens pool-wide routes
    TENANT KEY [admin]
    TENANT sha256:HEX [admin]
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton_protocol.errors import Forbidden, Unauthorized
from baton_protocol.hashing import tenant_salt
from baton_protocol.link import has_token, is_loopback
from baton_router.errors import StartError
from baton_router.settings import RouterSettings

HASHED = "sha256:"
ADMIN = "admin"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. `name` is "" if the router has no keys, and for the router's own admin key. `salt`
    is "" if tenants share KV. An `admin` may read what concerns all tenants."""

    name: str = ""
    salt: str = field(default="", repr=False)
    admin: bool = False


Keys = Mapping[bytes, Tenant]  # digest of a key to its tenant, without salt


class Tenants:
    """The keys of one configuration. A changed file makes a new object."""

    def __init__(
        self, keys: Keys, secret: str = "", admin_key: str = "", link_token: str = ""
    ) -> None:
        """Without `keys` everybody may send requests. With a `secret` no two tenants share KV."""
        salts = {tenant.name: _salt(secret, tenant.name) for tenant in (*keys.values(), Tenant())}
        self._open, self._salts, self._separate = not keys, salts, bool(secret)
        self._link_token = link_token
        self._tenants = {
            digest: replace(tenant, salt=salts[tenant.name]) for digest, tenant in keys.items()
        }
        if admin_key:
            self._tenants[_digest(admin_key)] = Tenant("", salts[""], admin=True)
        self.names = frozenset(tenant.name for tenant in self._tenants.values())

    @classmethod
    def of_settings(cls, settings: RouterSettings) -> Tenants:
        """Raise StartError if the file of keys cannot be read."""
        keys = read_keys(settings.api_keys) if settings.api_keys else {}
        secret = settings.tenant_secret if settings.sharing == "tenant" else ""
        return cls(keys, secret, settings.admin_key, settings.link_token)

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant of a request with this header. Raise Unauthorized."""
        return Tenant() if self._open else self._tenant_of_key(authorization)

    def admin(self, authorization: str | None) -> Tenant:
        """Check access to what concerns all tenants: an admin key or the link token is needed, or
        nothing if there are no keys at all. Raise Unauthorized, Forbidden."""
        if not self._tenants or self._has_link_token(authorization):
            return Tenant(admin=True)
        tenant = self._tenant_of_key(authorization)
        if not tenant.admin:
            raise Forbidden(
                "this route covers all tenants and needs an admin key: one whose line in the "
                f"file of keys ends with `{ADMIN}`",
                code="admin_key_required",
            )
        return tenant

    def viewer(self, authorization: str | None) -> Tenant:
        """Who looks at the pool: any tenant may, and an admin sees what concerns all. Nothing is
        needed if there are no keys at all. Raise Unauthorized."""
        if not self._tenants or self._has_link_token(authorization):
            return Tenant(admin=True)
        return self._tenant_of_key(authorization)

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name, as its keys give it; "" is the one of a router without keys.
        None if there is no such tenant: if tenants share no KV, no name means none."""
        if self._open:
            return None if name else Tenant()
        if name not in self._salts or (self._separate and not name):
            return None
        return Tenant(name, self._salts[name])

    def node_admin(self, authorization: str | None, peer: str | None) -> Tenant:
        """Check access to routes that change nodes: an admin key or the link token is needed. If
        the router has neither, only clients on this machine may. `peer` is the client's address.
        Raise Unauthorized, Forbidden."""
        if self._tenants or self._has_link_token(authorization):
            return self.admin(authorization)
        if self._link_token:
            raise Unauthorized(
                "this route needs the pool's link token; send it as `Authorization: Bearer TOKEN`",
                code="invalid_link_token",
            )
        if not is_loopback(peer or ""):
            raise Forbidden(
                "this router has no API keys and no link token, so only clients on its own "
                f"machine may use this route, and {peer or 'this client'} is not on it; give "
                "the router and its nodes a token (--link-token), and send it as "
                "`Authorization: Bearer TOKEN`"
            )
        return Tenant(admin=True)

    def _has_link_token(self, authorization: str | None) -> bool:
        return bool(self._link_token) and has_token(authorization or "", self._link_token)

    def _tenant_of_key(self, authorization: str | None) -> Tenant:
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(
                "the request has no API key; send it as `Authorization: Bearer KEY` or as"
                " `x-api-key: KEY`"
            )
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise Unauthorized("the API key is unknown; ask the operator of this pool for one")
        return tenant


def read_keys(path: str) -> Keys:
    """Read the file of keys. Raise StartError with the number of the bad line, but not its text."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise StartError(f"--api-keys {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise StartError(f"--api-keys {path} is not UTF-8 text; save the file as UTF-8") from None
    keys: dict[bytes, Tenant] = {}
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            tenant, digest = _entry(words)
            if digest in keys:
                raise ValueError(
                    f"this line repeats the key of line {lines[digest]}; write each key once"
                )
        except ValueError as error:
            raise StartError(f"--api-keys {path}, line {number}: {error}") from None
        keys[digest], lines[digest] = tenant, number
    if not keys:
        raise StartError(f"--api-keys {path} contains no key; write lines of TENANT KEY")
    return keys


def _entry(words: list[str]) -> tuple[Tenant, bytes]:
    """Parse the fields of a line. Raise ValueError without quoting a field, which may be a key."""
    if len(words) != 2 and words[2:] != [ADMIN]:
        raise ValueError(
            f"the line has {len(words)} words; write TENANT KEY or TENANT {HASHED}HEX, and "
            f"append `{ADMIN}` for an admin's key"
        )
    name, key = words[:2]
    tenant = Tenant(name, admin=len(words) > 2)
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            "the tenant's name is invalid; use at most 64 letters, digits, '.', '_' and '-', "
            "and start with a letter or digit"
        )
    if key.startswith(HASHED):
        if _HEX.fullmatch(key.removeprefix(HASHED)) is None:
            raise ValueError(f"{HASHED} is not followed by 64 hex digits; write the key's SHA-256")
        return tenant, bytes.fromhex(key.removeprefix(HASHED))
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            "the key contains characters that no HTTP header can carry; use printable "
            "ASCII characters"
        )
    return tenant, _digest(key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _salt(secret: str, name: str) -> str:
    return tenant_salt(secret.encode(), name) if secret else ""

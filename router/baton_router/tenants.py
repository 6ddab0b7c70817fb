"""Who asks: API keys, the tenants they belong to, and the salts that keep tenants' KV apart.

In: a file of keys, read once; a request's Authorization header. Out: its Tenant, or the 401 that
its client gets. Keys are held and looked up as SHA-256 digests, and no message repeats one.

    # one per line; a tenant may have several
    TENANT KEY
    TENANT sha256:HEX
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton_protocol.errors import Unauthorized
from baton_protocol.hashing import tenant_salt
from baton_router.errors import StartError
from baton_router.settings import RouterSettings

HASHED = "sha256:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")

Keys = Mapping[bytes, str]  # a key's digest -> its tenant


@dataclass(frozen=True, slots=True)
class Tenant:
    """`name` is "" where nobody is asked for a key, `salt` is "" where tenants share KV. `admin`
    may read what is every tenant's."""

    name: str = ""
    salt: str = field(default="", repr=False)
    admin: bool = False


class Tenants:
    """What was configured at one time: another file is another object."""

    def __init__(self, keys: Keys, secret: str = "") -> None:
        """Without keys anybody may ask; with a secret no two tenants share KV."""
        salts = {name: _salt(secret, name) for name in keys.values()}
        self._tenants = {digest: Tenant(name, salts[name]) for digest, name in keys.items()}

    @classmethod
    def of_settings(cls, settings: RouterSettings) -> Tenants:
        """Raise StartError for a file of keys that cannot be read."""
        keys = read_keys(settings.api_keys) if settings.api_keys else {}
        return cls(keys, settings.tenant_secret if settings.sharing == "tenant" else "")

    def who(self, authorization: str | None) -> Tenant:
        """Whose request has this header. Raise Unauthorized."""
        if not self._tenants:
            return Tenant()
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("there is no API key; send it as `Authorization: Bearer KEY`")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise Unauthorized("the API key is unknown; ask who runs this pool for one")
        return tenant


def read_keys(path: str) -> Keys:
    """Raise StartError: one line that names the file's line, and no word of it."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise StartError(f"--api-keys {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise StartError(f"--api-keys {path} is no text in UTF-8") from None
    keys: dict[bytes, str] = {}
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, digest = _entry(words)
            if digest in keys:
                raise ValueError(f"the key of line {lines[digest]} again; write each key once")
        except ValueError as error:
            raise StartError(f"--api-keys {path}, line {number}: {error}") from None
        keys[digest], lines[digest] = name, number
    if not keys:
        raise StartError(f"--api-keys {path} holds no key; write lines of TENANT KEY")
    return keys


def _entry(words: list[str]) -> tuple[str, bytes]:
    """Raise ValueError without repeating a word: any of them may be a key in the wrong place."""
    if len(words) != 2:
        raise ValueError(f"{len(words)} words; write TENANT KEY, or TENANT {HASHED}HEX")
    name, key = words
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            "the tenant's name is none; write at most 64 letters, digits, '.', '_' and '-', a"
            " letter or digit first"
        )
    if key.startswith(HASHED):
        if _HEX.fullmatch(key.removeprefix(HASHED)) is None:
            raise ValueError(f"{HASHED} is not followed by 64 hex digits; write the key's SHA-256")
        return name, bytes.fromhex(key.removeprefix(HASHED))
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the key holds what no header can carry; write letters, digits and signs")
    return name, _digest(key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _salt(secret: str, name: str) -> str:
    return tenant_salt(secret.encode(), name) if secret else ""

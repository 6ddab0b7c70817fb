"""The address of one Redis server, parsed from its URL.

    unix:///path[?db=N]   unix://user:password@/path
    redis://[user:password@]host[:port][/db]
    rediss://...          the same over TLS; ?ssl_ca_certs=FILE, ssl_certfile=FILE,
                          ssl_keyfile=FILE, ssl_cert_reqs=required|none, ssl_check_hostname=...

`with_login` adds a login that is configured separately. The `label` and the repr of an `Endpoint`
never hold the password.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from baton_kvstore.errors import StoreMisconfigured

Kind = Literal["unix", "tcp", "tls"]
SCHEMES: dict[str, Kind] = {"unix": "unix", "redis": "tcp", "rediss": "tls"}
TLS_OPTIONS = frozenset(
    {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)
DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address and login of a server. `path` is set for unix sockets, `host` and `port` for others.
    `options` are the TLS options from the URL's query."""

    kind: Kind
    path: str = ""
    host: str = ""
    port: int = DEFAULT_PORT
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The URL without credentials and options: for messages, logs and rendezvous hashing."""
        if self.kind == "unix":
            place = f"unix://{self.path}"
            return f"{place}?db={self.db}" if self.db else place
        scheme = "rediss" if self.kind == "tls" else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = f"{scheme}://{host}:{self.port}"
        return f"{place}/{self.db}" if self.db else place

    @property
    def server(self) -> tuple[str, str, int]:
        """Identifies the server: equal for all its databases, with or without TLS."""
        return self.path, self.host, self.port

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the ssl context of a rediss:// URL, None for others.

        It verifies certificate and host name unless `options` say otherwise. Raise
        StoreMisconfigured for TLS files that cannot be loaded.
        """
        if self.kind != "tls":
            return None
        options = dict(self.options)
        context = ssl.create_default_context()
        try:
            if "ssl_ca_certs" in options:
                context.load_verify_locations(options["ssl_ca_certs"])
            if "ssl_certfile" in options:
                context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
        except (OSError, ssl.SSLError) as error:
            raise StoreMisconfigured(f"TLS files of {self.label}: {error}") from error
        if options.get("ssl_check_hostname", "true").lower() in ("false", "0", "no"):
            context.check_hostname = False
        if options.get("ssl_cert_reqs", "required") == "none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def parse_endpoint(url: str) -> Endpoint:
    """Parse a Redis URL. Raise StoreMisconfigured with a message that never holds the password."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        host.encode("idna")
    except ValueError:
        # Python's message quotes the part that it cannot parse, which may be half a password.
        raise StoreMisconfigured(
            "not a Redis URL: bad host or port (percent-encode '/', '@' and ':' in a password)"
        ) from None
    kind = SCHEMES.get(parts.scheme)
    if kind is None:
        raise StoreMisconfigured(
            f"Redis URL scheme {parts.scheme!r} is unknown; use unix://, redis:// or rediss://"
        )
    if kind == "unix" and not parts.path:
        raise StoreMisconfigured("a unix:// Redis URL needs a path: unix:///run/redis.sock")
    if kind != "unix" and not host:
        raise StoreMisconfigured(f"a {parts.scheme}:// Redis URL needs a host")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    db_text = query.pop("db", "") or (parts.path.strip("/") if kind != "unix" else "")
    if db_text and not db_text.isdigit():
        # With an '@' the text may hold a part of the password.
        shown = "in the URL" if "@" in db_text else repr(db_text)
        raise StoreMisconfigured(f"Redis database {shown} is not a number")
    unknown = set(query) - (TLS_OPTIONS if kind == "tls" else frozenset())
    if unknown:
        raise StoreMisconfigured(f"unknown Redis URL options: {', '.join(sorted(unknown))}")
    return Endpoint(
        kind=kind,
        path=unquote(parts.path) if kind == "unix" else "",
        host=host if kind != "unix" else "",
        port=port or DEFAULT_PORT,
        db=int(db_text or 0),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        options=tuple(sorted(query.items())),
    )


def with_login(url: str, username: str, password: str) -> str:
    """Return `url` with this login, percent-encoded. A URL with its own login stays unchanged.

    Raise StoreMisconfigured for an invalid URL.
    """
    endpoint = parse_endpoint(url)
    if endpoint.username or endpoint.password or not (username or password):
        return url
    try:
        login = f"{quote(username, safe='')}:{quote(password, safe='')}"
    except UnicodeEncodeError:
        raise StoreMisconfigured("the Redis user name or password is not UTF-8") from None
    parts = urlsplit(url)
    return parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}").geturl()

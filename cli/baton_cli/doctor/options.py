"""Flags of `baton doctor`: what to check besides this machine."""

from __future__ import annotations

from dataclasses import dataclass

from baton_cli.logs import LogLevel
from baton_cli.options.records import StoreLoginOptions
from baton_protocol.options import MAX_PORT, option


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(StoreLoginOptions):
    TITLE = "doctor"

    log_level: LogLevel = option("warning", "log level on stderr")
    model: str = option("", "model folder or GGUF file", metavar="DIR")
    index: str = option("", "Redis for markers and registry", metavar="URL", secret=True)
    data: tuple[str, ...] = option(
        (), "Redis instances for KV bytes", metavar="URL", secret=True, several=True
    )
    router: str = option("", "URL of a running router", metavar="URL")
    api_key: str = option(
        "",
        "key of an admin, or the link token, for --router (use the variable; default: none)",
        metavar="KEY",
        secret=True,
    )
    kubernetes: bool = option(False, "check the cluster, its CRDs, its operator and your rights")
    namespace: str = option("default", "namespace of pools", metavar="NAME")
    pool: str = option("", "a pool in this namespace", metavar="NAME")
    context: str = option(
        "", "context of the kubeconfig (default: its current one)", metavar="NAME"
    )
    port: int | None = option(
        None,
        "port that shall be free; 0: none (default: 8000, if no other flag names what to check)",
        least=0,
        most=MAX_PORT,
    )
    json: bool = option(False, "print a JSON list of findings")

    @property
    def running(self) -> bool:
        """Whether flags name something that runs already, whose port cannot be free."""
        return bool(self.router or self.kubernetes or self.index or self.data)

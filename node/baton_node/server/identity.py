"""The node's identity: epoch, address, model files.

In: settings, the engine's EngineReady frame, the bound port. Out: `Identity`, which makes the
report for Hello frames and the registry.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_node.ipc.messages import EngineReady
from baton_node.settings import NodeSettings
from baton_protocol import PROTOCOL_VERSION
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Load
from baton_protocol.store import NodeReport
from baton_text.artifacts import CONFIG, digest
from baton_text.gguf.header import is_gguf

ANYWHERE = ("", "0.0.0.0", "::")
LOAD_FIELDS = tuple({*Load.__struct_fields__} & {*NodeReport.__struct_fields__})


def new_epoch() -> Epoch:
    return Epoch(secrets.token_hex(8))


def model_made(settings: NodeSettings) -> int:
    """Return when the model's config file, or its GGUF file, was written, in Unix seconds; 0 if
    there is none."""
    model = Path(settings.model)
    config = model if is_gguf(model) else model / CONFIG
    return max(0, int(config.stat().st_mtime)) if settings.model and config.exists() else 0


def address_of(settings: NodeSettings, port: int) -> str:
    """Return the URL at which routers reach this node: `settings.address`, or one made from the
    host (the machine's name if the node listens on all addresses) and `port`."""
    if settings.address:
        return settings.address
    host = settings.host
    if host in ANYWHERE:
        host = socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts about one node that do not change within an epoch."""

    settings: NodeSettings
    epoch: Epoch
    ready: EngineReady
    address: str
    digests: dict[str, str]  # file name -> SHA-256
    model_made: int = 0  # Unix seconds; 0: the model has no files

    def report(self, load: Load) -> NodeReport:
        """Return the node's report with this load. A Load's fields that NodeReport has too mean the
        same there."""
        info = self.ready.info
        newest = {name: getattr(load, name) for name in LOAD_FIELDS}
        return NodeReport(
            node=NodeId(self.settings.node),
            role=self.settings.role,
            address=self.address,
            pid=os.getpid(),
            fingerprint=info.fingerprint,
            layout=info.layout,
            model=self.settings.model_name(),
            engine=info.kind,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            artifacts=self.digests,
            revision=self.settings.revision,
            protocol=PROTOCOL_VERSION,
            max_num_seqs=info.max_num_seqs,
            model_made=self.model_made,
            exact=info.exact,
            weights=info.weights,
            max_logprobs=info.max_logprobs,
            pooling=info.pooling,
            **newest,
        )


def digests_of(artifacts: Mapping[str, bytes]) -> dict[str, str]:
    return {name: digest(data) for name, data in artifacts.items()}

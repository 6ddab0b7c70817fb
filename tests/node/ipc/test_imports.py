"""The server process of a node, and the simulated engine's, never load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SERVER = "import baton_prefill_node, baton_decode_node"
SIM_ENGINE = """
from baton_cli import engine_process as engine_main
from baton_node.engine.build_engine import build_engine
from baton_node.settings import NodeSettings
build_engine(NodeSettings(node="n", role="decode", engine="sim"))
"""


@pytest.mark.parametrize("code", [SERVER, SIM_ENGINE])
def test_server_processes_and_simulated_engines_do_not_import_torch(code: str) -> None:
    check = "import sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}\n{check}"], check=True, timeout=240)

"""The life of a node's engine process: build and measure the engine, run the step loop.

The node's server process starts it with one end of a socketpair and sends Start. The engine process
builds and measures the engine, sends EngineReady, and runs the step loop until the socket closes;
it never outlives the server. Every process has the same loop, whatever its role. It works with the
classes of both roles, which build on this package: so the module that is started,
`baton_cli.engine_process`, passes the function that puts a loop together.

In: Start and jobs. Out: EngineReady or SetupFailed, then the loop's messages. Logs go to stderr.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from baton_engine.config.engine_config import on_cuda
from baton_engine.core.engine_core import EngineCore
from baton_kvstore.errors import StoreError
from baton_node.artifacts import load_artifacts, load_tokenizer
from baton_node.engine.build_engine import build_engine
from baton_node.engine.grammar_compiler import GrammarCompiler
from baton_node.engine.loop import EngineLoop
from baton_node.engine.loop_context import LoopContext, LoopOptions
from baton_node.engine.measure_speeds import measure_compute, measure_transfers
from baton_node.errors import SetupError
from baton_node.ipc.engine_socket import EngineSocket, EngineSocketClosed
from baton_node.ipc.messages import EngineReady, SetupFailed, Start
from baton_node.settings import NodeSettings
from baton_node.store.address import StoreAddress
from baton_node.store.null_connector import NoStore
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Load
from baton_protocol.logs import formatter
from baton_protocol.parent_death import die_with
from baton_protocol.store import Speeds

if TYPE_CHECKING:
    from baton_text.grammars.grammars import Grammars

logger = logging.getLogger(__name__)
BuildLoop = Callable[[LoopContext, GrammarCompiler], EngineLoop]


def run_engine_process(arguments: list[str], build_loop: BuildLoop) -> int:
    """Return the exit code: 0 after the server closed its socket, 1 if the engine could not be
    built. `arguments` are the socket's file descriptor and the server's process id."""
    fd, parent = int(arguments[0]), int(arguments[1])
    die_with(parent)
    # Ctrl-C signals the whole process group, but the server decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = EngineSocket(socket.socket(fileno=fd))
    try:
        start = server.wait()[0]
        if not isinstance(start, Start):
            raise RuntimeError(f"the first frame is {type(start).__name__}, not Start")
        return _serve(server, start, build_loop)
    except EngineSocketClosed as closed:
        logger.info("%s", closed)
        return 0
    finally:
        server.close()


def _serve(server: EngineSocket, start: Start, build_loop: BuildLoop) -> int:
    settings, epoch = start.settings, start.epoch
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(settings.json_logs))
    logging.basicConfig(level=settings.log_level, handlers=[handler])
    try:
        engine = build_engine(settings)
        connector = _connect_store(settings, epoch, engine)
    except (SetupError, StoreError) as error:
        server.send(SetupFailed(str(error)))
        return 1
    try:
        speeds = _measure_speeds(settings, engine, connector)
        load = Load(epoch, "ready", speeds, engine.load(), connector.store_health())
        server.send(EngineReady(engine.info, load, engine.cached_chunks()))
        options = LoopOptions(epoch=epoch, fetch=settings.fetch, speeds=speeds)
        context = LoopContext(engine, connector, server, options)
        compiler = GrammarCompiler(
            lambda: _load_grammars(settings, engine.info.vocab_size), context.counters
        )
        try:
            build_loop(context, compiler).run()
        finally:
            compiler.close()
    finally:
        connector.close()
    return 0


def _load_grammars(settings: NodeSettings, vocab_size: int) -> Grammars:
    """The grammar compiler for the model's tokenizer. Its import takes 30 ms, and most nodes need
    none."""
    from baton_text.grammars.grammars import Grammars

    return Grammars(load_tokenizer(load_artifacts(settings)), vocab_size)


def _connect_store(
    settings: NodeSettings, epoch: Epoch, engine: EngineCore
) -> StoreConnector | NoStore:
    if not settings.index_url:
        return NoStore()
    address = StoreAddress(
        index_url=settings.index_url,
        data_urls=settings.data_urls,
        pool=settings.pool,
        node=NodeId(settings.node),
        epoch=epoch,
        fingerprint=engine.info.fingerprint,
        settings=settings.store_settings,
        write_behind_bandwidth=settings.write_behind_bandwidth,
    )
    connector = StoreConnector(address, engine.stored)
    connector.start()
    return connector


def _measure_speeds(
    settings: NodeSettings, engine: EngineCore, connector: StoreConnector | NoStore
) -> Speeds:
    info = engine.info
    gpu = info.kind == "torch" and on_cuda(settings.device)
    speeds = measure_compute(info, engine.runner, gpu=gpu)
    if isinstance(connector, NoStore):
        return speeds
    put, get, latency_ms = measure_transfers(
        connector.plane, settings.data_urls, info.fingerprint, info.layout
    )
    return msgspec.structs.replace(
        speeds, put_bytes_per_s=put, get_bytes_per_s=get, get_latency_ms=latency_ms
    )

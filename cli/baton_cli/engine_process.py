"""The main of a node's engine process: python -m baton_cli.engine_process FD PARENT_PID

The node's server process starts it with one end of a socketpair and sends Start. The engine process
builds and measures the engine, sends Ready, and runs the step loop until the socket closes; it
never outlives the server. Both roles run the same loop: `build_loop` combines the fetcher of
`baton_decode_node` with the publisher of `baton_prefill_node`.

In: Start and jobs. Out: Ready or SetupFailed, then the loop's messages. Logs go to stderr.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from baton_cli.options.devices import on_cuda
from baton_decode_node.fetcher import Fetcher
from baton_decode_node.write_behind import WriteBehind
from baton_engine.core.engine_core import EngineCore
from baton_kvstore.errors import StoreError
from baton_node.artifacts import load_artifacts, load_tokenizer
from baton_node.engine.build_engine import build_engine, measure_compute, measure_transfers
from baton_node.engine.grammars import CompilingJobs
from baton_node.engine.job import LoopContext, LoopOptions
from baton_node.engine.loop import EngineLoop
from baton_node.engine.running import OutgoingBlocks, RunningBatch
from baton_node.ipc.engine_socket import EngineSocketClosed, StreamEngineSocket
from baton_node.ipc.messages import Ready, SetupFailed, Start
from baton_node.settings import NodeSettings, SetupError
from baton_node.store.null_connector import NoStore
from baton_node.store.redis_connector import StoreAddress, StoreConnector
from baton_prefill_node.publisher import Publisher
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.logs import formatter
from baton_protocol.parent_death import die_with
from baton_protocol.store import Speeds, StoreHealth

if TYPE_CHECKING:
    from baton_text.grammar import Grammars

logger = logging.getLogger("baton_cli.engine_process")  # __name__ is "__main__" here


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 after the server closed its socket, 1 if the engine could not be
    built."""
    fd, parent = int(arguments[0]), int(arguments[1])
    die_with(parent)
    # Ctrl-C signals the whole process group, but the server decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = StreamEngineSocket(socket.socket(fileno=fd))
    try:
        start = server.wait()[0]
        if not isinstance(start, Start):
            raise RuntimeError(f"the first frame is {type(start).__name__}, not Start")
        return _serve(server, start)
    except EngineSocketClosed as closed:
        logger.info("%s", closed)
        return 0
    finally:
        server.close()


def _serve(server: StreamEngineSocket, start: Start) -> int:
    settings, epoch = start.settings, start.epoch
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(settings.json_logs))
    logging.basicConfig(level=settings.log_level, handlers=[handler])
    try:
        engine = build_engine(settings)
        connector = _connect(settings, epoch, engine)
    except (SetupError, StoreError) as error:
        server.send(SetupFailed(str(error)))
        return 1
    try:
        speeds = _measure(settings, engine, connector)
        server.send(_ready(engine, speeds, connector.store_health()))
        context = LoopContext(engine, connector, server, _options(settings, epoch, speeds))
        compiling = CompilingJobs(
            lambda: _grammars(settings, engine.info.vocab_size), context.counters
        )
        try:
            build_loop(context, compiling).run()
        finally:
            compiling.close()
    finally:
        connector.close()
    return 0


def _grammars(settings: NodeSettings, vocab_size: int) -> Grammars:
    """The grammar compiler for the model's tokenizer."""
    from baton_text.grammar import Grammars  # the import takes 30 ms, and most nodes need none

    return Grammars(load_tokenizer(load_artifacts(settings)), vocab_size)


def _connect(settings: NodeSettings, epoch: Epoch, engine: EngineCore) -> StoreConnector | NoStore:
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
    connector = StoreConnector(address, engine.memory)
    connector.start()
    return connector


def _measure(
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


def _ready(engine: EngineCore, speeds: Speeds, store: StoreHealth) -> Ready:
    info = engine.info
    return Ready(
        engine=info.kind,
        fingerprint=info.fingerprint,
        layout=info.layout,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_ids=info.eos_ids,
        speeds=speeds,
        load=engine.load(),
        chunks=engine.cached_chunks(),
        store=store,
        exact=info.exact,
    )


def _options(settings: NodeSettings, epoch: Epoch, speeds: Speeds) -> LoopOptions:
    return LoopOptions(
        epoch=epoch,
        lookup_wait_s=settings.lookup_wait_s,
        first_wait_s=settings.first_wait_s,
        blocks_wait_s=settings.blocks_wait_s,
        load_every_s=settings.load_every_s,
        events_every_s=settings.events_every_s,
        fetch=settings.fetch,
        speeds=speeds,
    )


def build_loop(context: LoopContext, compiling: CompilingJobs) -> EngineLoop:
    """Build the step loop, which is the same for both roles."""
    outgoing = OutgoingBlocks(context)
    publisher = Publisher(context, outgoing)
    write_behind = WriteBehind(context, outgoing)
    batch = RunningBatch(context, publisher, write_behind)
    fetcher = Fetcher(context, batch)
    return EngineLoop(context, batch, fetcher, publisher, write_behind, outgoing, compiling)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The server's handle on its engine process: start it, exchange frames with it, stop it.

In: frames for the engine. Out: frames from the engine. Raises EngineLost if the engine process ends
on its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque

from baton_node.errors import EngineLost, SetupError
from baton_node.ipc.framing import Unpacker, pack
from baton_node.ipc.messages import (
    EngineReady,
    SetupFailed,
    Start,
    ToEngine,
    ToServer,
    to_engine_codec,
    to_server_codec,
)
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch

# The main of an engine process. A name, not an import: a server process loads no engine.
ENGINE_MODULE = "baton_cli.engine_process"
READ_BYTES = 1 << 18
# Spinning idle OpenMP threads take cores from other engines on the machine: on 2 shared cores, a
# decode step of a model of the demo model's size took 740 ms instead of 73 ms.
PATIENT_THREADS = {"OMP_WAIT_POLICY": "passive"}
END_S = 1.5  # how long the process may run after its socket has closed, before it is killed


class EngineProcess:
    """One running engine process. Create it with start_engine()."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._unpacker = Unpacker()
        self._outgoing = to_engine_codec()
        self._incoming = to_server_codec()
        self._frames: deque[ToServer] = deque()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, record: ToEngine) -> None:
        """Queue a frame. Drop it if the engine is gone; next_frame() reports that."""
        if not self._writer.is_closing():
            self._writer.write(pack(self._outgoing.encode(record)))

    @property
    def unread_bytes(self) -> int:
        """Bytes of queued frames that the engine has not read yet. It reads between steps."""
        return self._writer.transport.get_write_buffer_size()

    async def next_frame(self) -> ToServer:
        """Return the engine's next frame. Raise EngineLost as soon as the engine closes its socket;
        describe_end() then tells how the process ended."""
        while not self._frames:
            data = await self._read()
            if not data:
                raise EngineLost(f"the engine process {self.pid} has closed its socket")
            for payload in self._unpacker.feed(data):
                self._frames.append(self._incoming.decode(payload))
        return self._frames.popleft()

    async def stop(self) -> None:
        """Close the socket, which makes the process exit. Kill it if it takes longer than END_S."""
        self._writer.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(READ_BYTES)
        except ConnectionError:
            return b""

    async def describe_end(self) -> str:
        """Return a message about how a lost engine ended. Wait END_S at most, then kill it."""
        try:
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
        except TimeoutError:
            self.kill()
            return f"the engine process {self.pid} closed its socket and did not end"
        outcome = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"the engine process {self.pid} ended: {outcome}; see its log"


async def start_engine(
    settings: NodeSettings, epoch: Epoch, module: str
) -> tuple[EngineProcess, EngineReady]:
    """Start the engine process with `module` as its main, and wait until the engine is ready.

    Raise SetupError if the engine cannot be built or is not ready within
    `settings.start_timeout_s`, and EngineLost if the process ends first. The process is stopped in
    each case.
    """
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(theirs.fileno()),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            env={**PATIENT_THREADS, **os.environ},
            pass_fds=(theirs.fileno(),),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)
    engine = EngineProcess(process, reader, writer)
    try:
        engine.send(Start(settings, epoch))
        async with asyncio.timeout(settings.start_timeout_s):
            frame = await engine.next_frame()
        if isinstance(frame, EngineReady):
            return engine, frame
        if isinstance(frame, SetupFailed):
            raise SetupError(frame.message)
        raise SetupError(
            f"the engine sent {type(frame).__name__} as its first frame instead of EngineReady"
        )
    except TimeoutError as error:
        await engine.stop()
        limit_s = settings.start_timeout_s
        raise SetupError(f"the engine was not ready within {limit_s:g} s") from error
    except EngineLost as error:
        how = await engine.describe_end()
        await engine.stop()
        raise EngineLost(how) from error
    except BaseException:
        await engine.stop()
        raise

"""The supervisor of a pool, with trivial scripts in place of nodes and router."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path

import psutil
import pytest

from baton_cli.errors import CommandError
from baton_cli.local_pool.children import ChildSpec
from baton_cli.local_pool.display import Display, TableRow
from baton_cli.local_pool.router_client import PoolState, RouterAddress
from baton_cli.local_pool.stop_requests import StopRequests
from baton_cli.local_pool.supervisor import PoolPlan, Supervisor, Timing
from tests.support.waiting import until

pytestmark = pytest.mark.integration

WAIT_S = 180.0
READY_S = 660.0
# A child that runs and never registers.
MUTE = "import time; time.sleep(600)"
# A child that registers its pid, and exits `slow` seconds after SIGTERM.
NODE = """
import os, pathlib, signal, sys, time
folder, name, slow = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def end(*_):
    with open(folder / "ends", "a") as log:
        log.write(name + "\\n")
    time.sleep(slow)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
draft = folder / (name + ".draft")
draft.write_text(str(os.getpid()))
draft.rename(folder / (name + ".pid"))
time.sleep(600)
"""


class Bench:
    """A supervisor over fake children. Its fake /pool lists the children that registered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.out = io.StringIO()
        self.stop = StopRequests()

    def spec(self, name: str, script: str = NODE, slow: float = 0.0) -> ChildSpec:
        return ChildSpec(
            name,
            name.split("-")[0],
            (sys.executable, "-c", script, str(self.folder), name, str(slow)),
        )

    def supervisor(
        self,
        *nodes: ChildSpec,
        router: ChildSpec,
        drain_s: float = 10,
        poll_s: float = Timing.poll_s,
        exit_grace_s: float = Timing.exit_grace_s,
    ) -> Supervisor:
        plan = PoolPlan(RouterAddress("127.0.0.1", 1), nodes, router, os.environ, drain_s, READY_S)
        display = Display(self.out, self.out)
        return Supervisor(
            plan,
            self.stop,
            display,
            self.look,
            lambda: self.now,
            Timing(poll_s, exit_grace_s, last_look_s=WAIT_S),
        )

    def look(self, router: RouterAddress) -> PoolState | None:
        nodes = tuple(
            TableRow(
                *(path.stem, path.stem.split("-")[0], int(path.read_text()), "ready", 1),
                address="http://n",
                exact="numeric",
            )
            for path in sorted(self.folder.glob("*-*.pid"))
        )
        return PoolState((self.folder / "router.pid").exists(), len(nodes), nodes)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def ends(self) -> list[str]:
        return (self.folder / "ends").read_text().split()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_pool_is_ready_when_every_node_is_ready(bench: Bench) -> None:
    supervisor = bench.supervisor(
        bench.spec("prefill-0"), bench.spec("decode-0"), router=bench.spec("router")
    )
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    pids = [bench.pid(name) for name in ("prefill-0", "decode-0", "router")]
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    for name, pid in zip(("prefill-0", "decode-0"), pids, strict=False):
        assert f"{name}: ready pid {pid} http://n\n" in bench.out.getvalue()


async def test_a_pool_serves_without_nodes_that_are_not_ready_in_time_and_names_them(
    bench: Bench,
) -> None:
    supervisor = bench.supervisor(
        bench.spec("prefill-0"),
        bench.spec("decode-0"),
        bench.spec("decode-1", MUTE),
        router=bench.spec("router"),
    )
    running = asyncio.create_task(supervisor.run())
    names = ("prefill-0", "decode-0", "router")
    await until(lambda: all((bench.folder / f"{name}.pid").exists() for name in names))
    await until(lambda: "decode-0: ready" in bench.out.getvalue())
    assert not supervisor.ready.is_set()
    bench.now = READY_S
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    message = "not ready after 660 s (--ready-timeout): decode-1 (starting); the pool serves with"
    assert message in bench.out.getvalue()
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_role_without_a_ready_node_in_time_ends_the_pool(
    bench: Bench,
) -> None:
    supervisor = bench.supervisor(
        bench.spec("prefill-0", MUTE), bench.spec("decode-0"), router=bench.spec("router")
    )
    running = asyncio.create_task(supervisor.run())
    await until(lambda: "decode-0: ready" in bench.out.getvalue())
    bench.now = READY_S
    with pytest.raises(CommandError, match=r"not ready after 660 s .*: prefill-0 \(starting\)$"):
        await asyncio.wait_for(running, WAIT_S)
    assert not supervisor.ready.is_set()


async def test_the_router_ends_before_the_nodes(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("decode-0"), router=bench.spec("router", slow=0.3))
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)
    assert bench.ends() == ["router", "decode-0"]
    assert "1 running requests get up to 10 s" in bench.out.getvalue()


async def test_a_second_signal_ends_everything_at_once(bench: Bench) -> None:
    supervisor = bench.supervisor(
        bench.spec("decode-0"), router=bench.spec("router", slow=600), drain_s=600
    )
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    bench.stop.request()
    await until(lambda: (bench.folder / "ends").exists())
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)
    assert bench.ends() == ["router"]  # the node was killed without a SIGTERM


async def test_a_router_that_drains_for_too_long_is_killed(bench: Bench) -> None:
    supervisor = bench.supervisor(
        bench.spec("decode-0"),
        router=bench.spec("router", slow=600),
        drain_s=0.1,
        exit_grace_s=0.2,
    )
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_child_that_exits_while_starting_fails_the_pool_with_its_last_line(
    bench: Bench,
) -> None:
    broken = bench.spec(
        "decode-0", "print('noise', flush=True); raise SystemExit('baton: no such model')"
    )
    supervisor = bench.supervisor(bench.spec("prefill-0"), broken, router=bench.spec("router"))
    with pytest.raises(CommandError, match="decode-0 exited with code 1 while starting: no such m"):
        await asyncio.wait_for(supervisor.run(), WAIT_S)
    assert "decode-0 | noise\n" in bench.out.getvalue()


async def test_a_child_that_dies_later_is_restarted(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("decode-0"), router=bench.spec("router"))
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    first = bench.pid("decode-0")
    psutil.Process(first).kill()
    await until(lambda: bench.pid("decode-0") != first)
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)
    assert "decode-0 was ended by SIGKILL; restarting it in 0.5 s\n" in bench.out.getvalue()
    assert not psutil.pid_exists(bench.pid("decode-0"))


async def test_the_last_line_of_a_child_that_exits_later_is_reported(bench: Bench) -> None:
    script = NODE.replace("sys.exit(0)", "sys.exit('baton: the engine is gone')")
    supervisor = bench.supervisor(bench.spec("decode-0", script), router=bench.spec("router"))
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    psutil.Process(bench.pid("decode-0")).terminate()
    message = "decode-0 exited with code 1 (the engine is gone); restarting it in 0.5 s\n"
    await until(lambda: message in bench.out.getvalue())
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_child_that_dies_repeatedly_after_serving_is_restarted_without_a_longer_wait(
    bench: Bench,
) -> None:
    supervisor = bench.supervisor(bench.spec("decode-0"), router=bench.spec("router"), poll_s=0.02)
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)

    async def kill_once() -> None:
        pid = bench.pid("decode-0")
        await until(lambda: f"decode-0: ready pid {pid} " in bench.out.getvalue())
        psutil.Process(pid).kill()
        await until(lambda: bench.pid("decode-0") != pid)

    for _ in range(3):
        await kill_once()
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)
    assert bench.out.getvalue().count("SIGKILL; restarting it in 0.5 s\n") == 3


async def test_a_child_killed_while_starting_is_restarted(bench: Bench) -> None:
    script = (
        f"import os, signal, sys\nif not os.path.exists(sys.argv[1] + '/once'):\n"
        f"    open(sys.argv[1] + '/once', 'w').close()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{NODE}"
    )
    supervisor = bench.supervisor(bench.spec("decode-0", script), router=bench.spec("router"))
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    bench.stop.request()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_cancelled_supervisor_leaves_no_child(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.spec("decode-0"), router=bench.spec("router", slow=600))
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.ready.wait(), WAIT_S)
    pids = [bench.pid("decode-0"), bench.pid("router")]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))

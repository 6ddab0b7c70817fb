"""Several router processes: what `baton router --workers` and `baton up --routers` tell each."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from baton_cli.commands.roles import worker_pool
from baton_cli.commands.up import folder_of_routers, make_plan
from baton_cli.local_pool.store import StoreUrls
from baton_cli.main import read_command
from baton_cli.options.records import RouterOptions, UpOptions

ROUTER = RouterOptions(
    host="0.0.0.0",
    port=0,
    pool="p",
    workers=3,
    nodes=("http://a:1",),
    redis_index="redis://:s3cret@i",
    link_token="s3cret",
    json_logs=True,
)


def test_a_worker_is_the_same_router_alone_on_the_port_that_was_found() -> None:
    made = worker_pool(ROUTER)
    argv = made.command(Path("/run/2.sock"), 8123)
    own = {name: text for name, text in made.environment.items() if name.startswith("BATON_")}
    command, options = read_command(argv[3:], own)
    assert command.words == "router"
    assert options == replace(
        ROUTER, workers=1, port=8123, worker_socket="/run/2.sock", supervisor_pid=os.getpid()
    )
    assert (made.workers, made.pool, made.host, made.port) == (3, "p", "0.0.0.0", 0)


def test_a_secret_is_on_no_worker_s_command_line() -> None:
    made = worker_pool(ROUTER)
    assert "s3cret" not in " ".join(made.command(Path("/run/0.sock"), 1))
    assert made.environment["BATON_LINK_TOKEN"] == "s3cret"


def test_up_tells_its_router_how_many_it_is_and_where_they_meet() -> None:
    options = UpOptions(engine="sim", routers=2)
    with folder_of_routers(options) as folder:
        plan = make_plan(options, StoreUrls("unix:///i", ("unix:///d",)), {}, folder)
        _, told = read_command(plan.router.argv[3:], {})
        assert isinstance(told, RouterOptions)
        assert told.workers == 2
        assert plan.router.variables["TMPDIR"] == folder
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


def test_one_router_meets_nobody() -> None:
    options = UpOptions(engine="sim")
    with folder_of_routers(options) as folder:
        plan = make_plan(options, StoreUrls("unix:///i", ("unix:///d",)), {}, folder)
    assert folder == ""
    assert "TMPDIR" not in plan.router.variables

"""Several router processes: what `baton router --workers` and `baton up --routers` pass on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from baton_cli.commands.roles import worker_pool
from baton_cli.commands.up import folder_of_routers
from baton_cli.commands.up_plan import make_plan
from baton_cli.local_pool.store import StoreUrls
from baton_cli.main import read_command
from baton_cli.options.records import RouterOptions, UpOptions

ROUTER = RouterOptions(
    host="0.0.0.0",
    port=0,
    pool="p",
    workers=3,
    nodes=("http://a:1",),
    index_url="redis://:s3cret@i",
    link_token="s3cret",
    json_logs=True,
)


def test_a_worker_gets_the_router_s_options_and_the_bound_port() -> None:
    workers = worker_pool(ROUTER)
    argv = workers.command(Path("/run/2.sock"), 8123)
    variables = {
        name: text for name, text in workers.environment.items() if name.startswith("BATON_")
    }
    command, options = read_command(argv[3:], variables)
    assert command.words == "router"
    assert options == replace(
        ROUTER, workers=1, port=8123, worker_socket="/run/2.sock", supervisor_pid=os.getpid()
    )
    assert (workers.workers, workers.pool, workers.host, workers.port) == (3, "p", "0.0.0.0", 0)


def test_secrets_are_on_no_worker_s_command_line() -> None:
    workers = worker_pool(ROUTER)
    assert "s3cret" not in " ".join(workers.command(Path("/run/0.sock"), 1))
    assert workers.environment["BATON_LINK_TOKEN"] == "s3cret"


def test_up_passes_the_number_of_routers_and_their_common_folder() -> None:
    options = UpOptions(engine="sim", routers=2)
    with folder_of_routers(options) as folder:
        plan = make_plan(options, StoreUrls("unix:///i", ("unix:///d",)), {}, folder)
        _, router = read_command(plan.router.argv[3:], {})
        assert isinstance(router, RouterOptions)
        assert router.workers == 2
        assert plan.router.variables["TMPDIR"] == folder
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


def test_a_single_router_gets_no_common_folder() -> None:
    options = UpOptions(engine="sim")
    with folder_of_routers(options) as folder:
        plan = make_plan(options, StoreUrls("unix:///i", ("unix:///d",)), {}, folder)
    assert folder == ""
    assert "TMPDIR" not in plan.router.variables

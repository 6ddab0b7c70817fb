"""`baton up`: runs a whole pool on this machine.

In: UpOptions. Out: a pool until Ctrl-C, or one answer (--once). Flags, model, port and store are
checked before any node or router starts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import socket
import sys
import time
from dataclasses import replace

from baton_cli.commands.role_settings import check_parsers, check_template
from baton_cli.commands.up_plan import make_plan
from baton_cli.errors import CommandError
from baton_cli.local_pool.chat_answer import ChatAnswer, ask
from baton_cli.local_pool.display import Display
from baton_cli.local_pool.machine import cpu_flags, decide_dtype
from baton_cli.local_pool.router_client import RouterAddress
from baton_cli.local_pool.stop_requests import StopRequests
from baton_cli.local_pool.store import open_store
from baton_cli.local_pool.supervisor import Supervisor
from baton_cli.models.local_folder import find_model, read_config
from baton_cli.options.records import UpOptions
from baton_protocol.parent_death import die_with


def run(options: UpOptions) -> int:
    started = time.monotonic()
    if options.supervisor_pid:
        die_with(options.supervisor_pid)
    options = settle(options)
    if options.uds:
        asyncio.run(_up(options, started))
        return 0
    with reserve_port(options.host, options.port) as port:
        options = replace(options, port=port.getsockname()[1])
        asyncio.run(_up(options, started))
    return 0


def settle(options: UpOptions) -> UpOptions:
    """Check the flags, and resolve what all engines must agree on: model folder, served name,
    dtype. Raise CommandError."""
    if options.prefill + options.decode == 0:
        raise CommandError(
            "--prefill 0 --decode 0 leaves no node to answer; give at least one node"
        )
    if options.missing_role != "aggregate" and 0 in (options.prefill, options.decode):
        role = "decode" if options.prefill else "prefill"
        raise CommandError(
            f"--{role} 0 with --missing-role {options.missing_role} leaves no node for the work "
            f"of a {role} node; give --missing-role aggregate"
        )
    if bool(options.redis_index) != bool(options.redis_data):
        raise CommandError("give both --redis-index and --redis-data, or neither")
    if (options.redis_username or options.redis_password) and not options.redis_index:
        raise CommandError(
            "--redis-username and --redis-password are for your own Redis: give --redis-index "
            "and --redis-data too, or leave them (and their variables) out"
        )
    check_parsers(options)
    options = replace(settle_tenants(options), chat_template=check_template(options.chat_template))
    if options.engine == "sim" and not options.model:
        return options
    model = find_model(options.model, weights=options.engine == "torch")
    dtype = options.dtype
    if options.engine == "torch":
        dtype = decide_dtype(dtype, options.device, read_config(model.path), cpu_flags())
    names = options.served_model_name or (model.name,)
    return replace(options, model=str(model.path), served_model_name=names, dtype=dtype)


def settle_tenants(options: UpOptions) -> UpOptions:
    """Validate the tenants' files, and generate secrets that were not given. Raise CommandError.

    The supervisor polls the router with the admin key. A generated tenant secret is never shown:
    KV that it salted and that outlives the pool in the user's Redis is never found again.
    """
    if options.sharing == "tenant" and not options.api_keys:
        raise CommandError(
            "--sharing tenant needs API keys to tell tenants apart: give --api-keys FILE, or "
            "--sharing pool"
        )
    from baton_router.admission.tenant_limits import read_limits
    from baton_router.auth import read_keys
    from baton_router.errors import StartError

    try:
        read_limits(options.tenants)
        if not options.api_keys:
            return options
        if options.once or options.ask:
            raise CommandError(
                "--once and --ask send no API key: leave them out, or leave out --api-keys"
            )
        read_keys(options.api_keys)
    except StartError as error:
        raise CommandError(str(error)) from error
    options = replace(options, admin_key=options.admin_key or secrets.token_hex(32))
    if options.sharing == "tenant" and not options.tenant_secret:
        return replace(options, tenant_secret=secrets.token_hex(32))
    return options


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a bound socket that never listens. It keeps the kernel from giving the port to others,
    while the router can still bind it (SO_REUSEADDR). Raise CommandError if the port is in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CommandError(f"--host {host}: {error.strerror}") from error
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise CommandError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; give another --port"
        ) from error
    return reserved


async def _up(options: UpOptions, started: float) -> None:
    stop = StopRequests()
    stop.install(asyncio.get_running_loop())
    # With --once only the answer goes to stdout, for scripts that read it.
    display = Display(sys.stderr if options.once else sys.stdout, sys.stderr)
    with open_store(options) as store:
        plan = make_plan(options, store.urls, os.environ)
        if plan.warning:
            display.note(plan.warning)
        supervisor = Supervisor(plan, stop, display)
        keeper = asyncio.create_task(store.keep(display.note))
        greeter = asyncio.create_task(_greet(options, supervisor, stop, display, started))
        try:
            await supervisor.run()
        finally:
            greeter.cancel()
            keeper.cancel()
            display.close()
    answered = greeter.done() and not greeter.cancelled()
    if answered:
        greeter.result()  # raises if the question failed
    elif options.once:
        raise CommandError("the pool ended before it answered")


async def _greet(
    options: UpOptions, supervisor: Supervisor, stop: StopRequests, display: Display, started: float
) -> None:
    """When the pool is ready, send the question of --once or --ask, and print the ready lines."""
    await supervisor.ready.wait()
    ready_s = time.monotonic() - started
    address = RouterAddress(options.host, options.port, uds=options.uds)
    if options.once:
        try:
            answer = await asyncio.to_thread(ask, address, options.once)
            print(show_answer(answer, ready_s), flush=True)
        finally:
            stop.requested.set()
        return
    if options.ask:
        try:
            answer = await asyncio.to_thread(ask, address, options.ask)
            display.note(f"\n> {options.ask}\n{show_answer(answer, ready_s)}\n")
        except CommandError as error:
            display.note(f"{options.ask!r}: {error}")
    display.note(show_ready(options, address, ready_s, supervisor.chunks))


def show_answer(answer: ChatAnswer, ready_s: float) -> str:
    """Format answer, placement and timings. The rate leaves out the first token, because its time
    is mostly prefill."""
    after_first_s = answer.total_s - answer.first_token_s
    rate = (answer.tokens - 1) / after_first_s if answer.tokens > 1 and after_first_s > 0 else 0.0
    return "\n".join(
        [
            answer.text,
            "",
            f"placement  {answer.placement}",
            f"timings    ready {ready_s:.1f} s after start; {answer.prompt_tokens} prompt tokens,"
            f" first token {1000 * answer.first_token_s:.0f} ms; {answer.tokens} tokens in"
            f" {answer.total_s:.2f} s ({rate:.1f} tokens/s after the first)",
        ]
    )


def show_ready(options: UpOptions, address: RouterAddress, ready_s: float, chunks: str) -> str:
    model = " and ".join(options.served_model_name) or options.engine
    where = f"{address.url}/v1"
    headers = "-H 'content-type: application/json'"
    if options.api_keys:
        headers += ' -H "Authorization: Bearer KEY"'
    if address.uds:
        where += f" on {address.shown}"
        headers += f" --unix-socket {shlex.quote(address.uds)}"
    return "\n".join(
        [
            f"ready after {ready_s:.1f} s: {where} serves {model}; Ctrl-C stops it",
            *([chunks] if chunks else []),
            # A browser reaches no unix socket.
            *([f"watch it: {address.url}/"] if options.page and not address.uds else []),
            f"try: curl {address.url}/v1/chat/completions {headers} \\",
            """          -d '{"messages": [{"role": "user", "content": "Hello"}]}'""",
        ]
    )

"""Plans the processes of `baton up`: their flags, variables, and shares of this machine.

In: PoolOptions that are settled, the store's URLs, an environment. Out: a PoolPlan, for the
supervisor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baton_cli.local_pool.children import ChildSpec
from baton_cli.local_pool.engine_memory import check_memory, fixed_bytes, share_memory
from baton_cli.local_pool.gpus import (
    VISIBLE,
    Gpu,
    Share,
    choose_gpus,
    list_gpus,
    share_gpus,
    time_slicing,
)
from baton_cli.local_pool.machine import cores, share_cores
from baton_cli.local_pool.router_client import RouterAddress
from baton_cli.local_pool.store import StoreUrls
from baton_cli.local_pool.supervisor import PoolPlan
from baton_cli.options.devices import CUDA
from baton_cli.options.environment import for_children
from baton_cli.options.flag import to_argv, to_variables
from baton_cli.options.records import (
    CommonOptions,
    NodeOptions,
    PoolOptions,
    RouterOptions,
    TraceOptions,
)
from baton_engine.config.engine_config import on_cuda
from baton_engine.memory.host_memory import free_memory
from baton_node.settings import ExchangeSettings, ModelSettings
from baton_protocol.options import values_of
from baton_router.settings import (
    AdmissionSettings,
    FileSettings,
    RequestSettings,
    TenantSettings,
)

PYTHON = (sys.executable, "-m", "baton_cli")


class Machine(NamedTuple):
    """Functions that read a machine's resources. `free` returns free memory in bytes, None if
    unknown; `gpus` lists the GPUs that a process with these variables may use."""

    free: Callable[[], int | None] = free_memory
    gpus: Callable[[Mapping[str, str]], list[Gpu]] = list_gpus


THIS_MACHINE = Machine()


def make_plan(
    options: PoolOptions,
    store: StoreUrls,
    environment: Mapping[str, str],
    machine: Machine = THIS_MACHINE,
) -> PoolPlan:
    """Build each child's command line and environment. Prefill nodes come first: see
    share_cores()."""
    nodes = []
    shares = share_machine(options, environment, machine)
    for (role, name), share in zip(name_nodes(options), shares, strict=True):
        its_options = node_options(options, store, name, share)
        nodes.append(_child(role, name, its_options, share.variables))
    gpus = [share.variables[VISIBLE] for share in shares if VISIBLE in share.variables]
    return PoolPlan(
        address=RouterAddress(options.host, options.port, options.admin_key, options.uds),
        nodes=tuple(nodes),
        router=_child("router", "router", router_options(options, store), {}),
        environment=for_children(environment),
        drain_timeout_s=options.drain_timeout,
        ready_timeout_s=options.ready_timeout,
        warning=time_slicing(gpus, environment),
    )


def name_nodes(options: PoolOptions) -> list[tuple[str, str]]:
    """The role and name of each node, prefill nodes first."""
    counts = {"prefill": options.prefill, "decode": options.decode}
    return [(role, f"{role}-{i}") for role, count in counts.items() for i in range(count)]


@dataclass(frozen=True)
class NodeShare:
    """One engine's share of this machine: threads, bytes of KV (None: its own default), and the
    variables that select its GPU."""

    threads: int
    kv_memory: int | None
    variables: Mapping[str, str]


def share_machine(
    options: PoolOptions, environment: Mapping[str, str], machine: Machine = THIS_MACHINE
) -> list[NodeShare]:
    """Return one share per engine, prefill nodes first. Raise CommandError if they do not fit."""
    engines = options.prefill + options.decode
    threads = share_cores(cores(), engines)
    if options.threads is not None:
        threads = [options.threads] * engines
    kv_memory = options.kv_memory
    given = kv_memory is not None or options.kv_blocks is not None
    store = 0 if options.redis_index else options.store_memory
    if not options.overcommit:
        check_memory(options, engines, store, machine.free())
    if options.engine == "sim" or not on_cuda(options.device):
        if options.engine != "sim" and not given:
            others = 0 if options.overcommit else store
            kv_memory = share_memory(options, engines, others, machine.free())
        return [NodeShare(count, kv_memory, {}) for count in threads]
    gpus = choose_gpus(machine.gpus(environment), options.device)
    if given:
        turns = [gpus[index % len(gpus)].name for index in range(engines)]
        shares = [Share(name, kv_memory) for name in turns]
    else:
        totals = [gpu.memory.total for gpu in gpus if gpu.memory is not None]
        needed = fixed_bytes(options, max(totals, default=0))
        shares = share_gpus(gpus, engines, needed, options.gpu_memory_utilization)
    return [
        NodeShare(count, share.kv_memory, {VISIBLE: share.gpu})
        for count, share in zip(threads, shares, strict=True)
    ]


def node_options(
    options: PoolOptions, store: StoreUrls, name: str, share: NodeShare
) -> NodeOptions:
    shared = values_of(options, ModelSettings, ExchangeSettings, TraceOptions)
    # share_machine() has checked the memory of all nodes. A node's own check would count the
    # others' memory as taken, hence overcommit.
    shared["served_model_name"] = options.served_model_name[:1]  # the router has them all
    shared |= {"threads": share.threads, "kv_memory": share.kv_memory, "overcommit": True}
    if VISIBLE in share.variables:
        shared["device"] = CUDA  # the node sees only one GPU
    return NodeOptions(
        **shared,
        node=name,
        pool=options.pool,
        index_url=store.index,
        data_urls=store.data,
        drain_timeout_s=options.drain_timeout,
        supervisor_pid=os.getpid(),
    )


def router_options(options: PoolOptions, store: StoreUrls) -> RouterOptions:
    return RouterOptions(
        **values_of(
            *(options, RequestSettings, AdmissionSettings, TenantSettings, FileSettings),
            TraceOptions,
        ),
        host=options.host,
        port=options.port,
        uds=options.uds,
        pool=options.pool,
        index_url=store.index,
        served_model_name=options.served_model_name,
        drain_timeout_s=options.drain_timeout,
        expect_nodes=tuple(name for _, name in name_nodes(options)),
        supervisor_pid=os.getpid(),
    )


def _child(
    words: str, name: str, options: CommonOptions, variables: Mapping[str, str]
) -> ChildSpec:
    environment = {**variables, **to_variables(options)}
    return ChildSpec(name, words, (*PYTHON, words, *to_argv(options)), environment)

"""A control plane: etcd, API server, controller manager and scheduler.

In: the programs, a folder for state, and a Site with addresses and flags. Out: about 9 s later, a
Kubernetes cluster without nodes, which can do everything except run pods. It needs no root, and
several can run at once.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from baton_cli.commands.up import reserve_port
from tests.cluster.machine.certificates import (
    Holder,
    control_plane_holders,
    write_certificates,
    write_kubeconfig,
)
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.cluster.machine.processes import Processes

BOOT_S = 300.0
_AGGREGATION = {
    "--requestheader-allowed-names": "front-proxy-client",
    "--requestheader-extra-headers-prefix": "X-Remote-Extra-",
    "--requestheader-group-headers": "X-Remote-Group",
    "--requestheader-username-headers": "X-Remote-User",
    "--enable-aggregator-routing": "true",
}


@dataclass(frozen=True)
class Site:
    """A control plane's addresses and flags. `enter` is a prefix of each command (nsenter)."""

    address: str
    apiserver_port: int
    etcd_port: int
    peer_port: int
    services: str
    first_service_address: str
    enter: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    apiserver_flags: tuple[str, ...] = ()
    controller_flags: tuple[str, ...] = ()


class ControlPlane(Kubernetes):
    """`with ControlPlane(programs, folder) as one:` boots it and removes it."""

    def __init__(self, programs: Path, state: Path, site: Site | None = None) -> None:
        super().__init__(state / "admin.conf", programs, state)
        self._ports: list[socket.socket] = []
        self._site = site or self._local_site()
        self._processes = Processes(state / "logs", str(state))
        self._certificates = state / "certificates"

    def __enter__(self) -> Self:
        try:
            self.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"https://{self._site.address}:{self._site.apiserver_port}"

    def boot(self) -> None:
        site = self._site
        holders = control_plane_holders(site.address, site.first_service_address)
        write_certificates(self._programs, self._certificates, [*holders, *site.holders])
        write_kubeconfig(self.kubeconfig, self.url, self._certificates, "admin")
        self._start("etcd", self._etcd())
        self.start_apiserver()
        self._start("kube-controller-manager", self._controller_manager())
        self._start("kube-scheduler", self._component("kube-scheduler"))
        # Pods need it to be admitted. The controller manager creates it once it is ready.
        self._wait_for("the default service account", "get", "serviceaccount", "default")

    def stop_apiserver(self) -> None:
        """Kill the API server, which breaks all its connections."""
        self._processes.stop("kube-apiserver")

    def start_apiserver(self) -> None:
        """Start the API server, again with the same data and port; wait until it is ready."""
        self._start("kube-apiserver", self._apiserver())
        self._wait_for("the API server", "get", "--raw", "/readyz")

    def close(self) -> None:
        self._processes.close()
        for reserved in self._ports:
            reserved.close()
        shutil.rmtree(self._state, ignore_errors=True)

    def _start(self, name: str, args: list[str]) -> None:
        program = str(self._programs / args[0])
        self._processes.start(name, [*self._site.enter, program, *args[1:]])

    def _wait_for(self, what: str, *args: str) -> None:
        def answered() -> str:
            try:
                self.kubectl(*args)
            except (CommandFailed, subprocess.TimeoutExpired) as error:
                return str(error)
            return ""

        self._until(what, answered)

    def _until(self, what: str, problem: Callable[[], str]) -> None:
        """Return once `problem()` is "" and every process runs. Raise RuntimeError with the problem
        and with the logs of ended processes."""
        deadline = time.monotonic() + BOOT_S
        while (reason := problem()) or self._processes.ended():
            ended = self._processes.ended()
            if ended or time.monotonic() > deadline:
                logs = "".join(f"\n--- {name}\n{self._processes.log_tail(name)}" for name in ended)
                raise RuntimeError(f"{what} is not ready: {reason}; ended: {ended}{logs}")
            time.sleep(0.1)

    def _local_site(self) -> Site:
        self._ports = [reserve_port("127.0.0.1", 0) for _ in range(3)]
        first, second, third = (reserved.getsockname()[1] for reserved in self._ports)
        return Site(
            "127.0.0.1",
            apiserver_port=first,
            etcd_port=second,
            peer_port=third,
            services="10.96.0.0/16",
            first_service_address="10.96.0.1",
            # The API server listens only on loopback, so its Service needs no endpoint.
            apiserver_flags=("--endpoint-reconciler-type=none",),
        )

    def _etcd(self) -> list[str]:
        client = f"http://127.0.0.1:{self._site.etcd_port}"
        peer = f"http://127.0.0.1:{self._site.peer_port}"
        return [
            "etcd",
            "--name=one",
            f"--data-dir={self._state / 'etcd'}",
            *(f"--{kind}-client-urls={client}" for kind in ("listen", "advertise")),
            *(f"--{kind}-peer-urls={peer}" for kind in ("listen", "initial-advertise")),
            f"--initial-cluster=one={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver(self) -> list[str]:
        site, folder = self._site, self._certificates
        return [
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{site.etcd_port}",
            f"--bind-address={site.address}",
            f"--advertise-address={site.address}",
            f"--secure-port={site.apiserver_port}",
            f"--service-cluster-ip-range={site.services}",
            f"--cert-dir={folder}",
            f"--client-ca-file={folder}/ca.crt",
            f"--tls-cert-file={folder}/apiserver.crt",
            f"--tls-private-key-file={folder}/apiserver.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={folder}/sa.key",
            f"--service-account-key-file={folder}/sa.pub",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={folder}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={folder}/apiserver-kubelet-client.key",
            f"--kubelet-certificate-authority={folder}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={folder}/front-proxy-ca.crt",
            f"--proxy-client-cert-file={folder}/front-proxy-client.crt",
            f"--proxy-client-key-file={folder}/front-proxy-client.key",
            *(f"{flag}={value}" for flag, value in _AGGREGATION.items()),
            *site.apiserver_flags,
        ]

    def _component(self, name: str) -> list[str]:
        """The command of a component that only uses the API server and serves nothing itself."""
        config = self._state / f"{name}.conf"
        write_kubeconfig(config, self.url, self._certificates, name)
        kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        flags = [f"--{kind}={config}" for kind in kinds]
        return [name, *flags, "--secure-port=0", "--leader-elect=false"]

    def _controller_manager(self) -> list[str]:
        folder = self._certificates
        return [
            *self._component("kube-controller-manager"),
            "--use-service-account-credentials=true",
            f"--root-ca-file={folder}/ca.crt",
            f"--service-account-private-key-file={folder}/sa.key",
            f"--cluster-signing-cert-file={folder}/ca.crt",
            f"--cluster-signing-key-file={folder}/ca.key",
            # Nodes have fixed ranges of pod addresses.
            "--controllers=*,-node-ipam-controller,-node-route-controller",
            "--horizontal-pod-autoscaler-sync-period=5s",
            # At the default of 20 requests/s it needs 4 s for its controllers' service accounts.
            "--kube-api-qps=300",
            "--kube-api-burst=300",
            *self._site.controller_flags,
        ]

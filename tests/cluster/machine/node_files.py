"""The settings of a node's programs: containerd, the network plugins and kubelet.

In: a node's folder, name and addresses. Out: files in that folder. The settings move what these
programs write into that folder; mounts in the node's namespace cover the other paths to which they
write (`init_script`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster.machine.addresses import Addresses
from tests.cluster.machine.certificates import write_kubeconfig

PAUSE_IMAGE = "baton.test/pause:1"
CNI_PLUGINS = "/usr/lib/cni"
# If these settings have other values, kubelet changes them for the whole machine.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}

_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
disable_apparmor = true
# On some machines root may not lower a process's OOM score, so no sandbox would start.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{folder}/registries"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{folder}/networks"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""

_INIT = """\
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/log
mount -t overlay overlay -o lowerdir=/var/lib,upperdir={folder}/upper,workdir={folder}/work /var/lib
{settings}
exec {pause}
"""


def write(folder: Path, name: str, group: str, addresses: Addresses, index: int) -> None:
    for inner in ("upper", "work", "kernel", "networks", "registries/_default"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    containerd = _CONTAINERD.format(folder=folder, pause=PAUSE_IMAGE, plugins=CNI_PLUGINS)
    (folder / "containerd.toml").write_text(containerd)
    # Every pull fails at once, whatever registry a pod names.
    (folder / "registries/_default/hosts.toml").write_text('server = "http://127.0.0.1:1"\n')
    network = json.dumps(_network(folder, addresses.node_pods(index)))
    (folder / "networks/10-pods.conflist").write_text(network)
    (folder / "kubelet.json").write_text(
        json.dumps(_kubelet(folder, name, group, addresses, index))
    )


def init_script(folder: Path, pause: Path) -> str:
    """The shell script of the node's first process, which ends by replacing itself with `pause`."""
    lines = []
    for setting, value in KERNEL_SETTINGS.items():
        file = folder / "kernel" / setting.replace("/", ".")
        file.write_text(f"{value}\n")
        lines.append(f"mount --bind {file} /proc/sys/{setting}")
    return _INIT.format(folder=folder, settings="\n".join(lines), pause=pause)


def kubelet_kubeconfig(folder: Path, server: str, certificates: Path, name: str) -> Path:
    return write_kubeconfig(folder / "kubelet.conf", server, certificates, name)


def proxy_flags(state: Path, addresses: Addresses, name: str) -> list[str]:
    return [
        f"--kubeconfig={state / 'kube-proxy.conf'}",
        f"--hostname-override={name}",
        "--proxy-mode=nftables",
        f"--cluster-cidr={addresses.pods}",
        # 0 leaves these kernel settings unchanged. kube-proxy exits if it may not write them.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--healthz-bind-address=127.0.0.1:10256",
        "--metrics-bind-address=127.0.0.1:10249",
    ]


def _network(folder: Path, pods: str) -> dict[str, Any]:
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(folder / "addresses"),
    }
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": ipam,
    }
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def _kubelet(
    folder: Path, name: str, group: str, addresses: Addresses, index: int
) -> dict[str, Any]:
    certificates = folder.parent / "certificates"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": addresses.node(index),
        "tlsCertFile": f"{certificates}/{name}.crt",
        "tlsPrivateKeyFile": f"{certificates}/{name}.key",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{certificates}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "enforceNodeAllocatable": ["pods"],
        # By default kubelet refuses version 1 of control groups, and machines with swap.
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [addresses.core],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "podLogsDir": f"{folder}/pod-logs",
        "volumePluginDir": f"{folder}/volume-plugins",
        # The controller manager expects one of these within --node-monitor-grace-period.
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        # Images cannot be pulled again, so kubelet must delete none, even if the disk is full.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            **{
                f"{disk}.{what}": "0%"
                for disk in ("nodefs", "imagefs")
                for what in ("available", "inodesFree")
            },
        },
        # The default of 5 minutes is too long for tests.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "10s"},
    }

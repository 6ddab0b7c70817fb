"""Where the API server is and how to log in: one answer for kopf's watches and for our requests.

In: the pod's service account, else $KUBECONFIG, else ~/.kube/config. Out: a Configuration of the
official client, which reads a service account's token anew before it expires; the same as kopf
wants it, which asks again whenever the server no longer knows it (401).

ConnectionFailed    there is no login; one line
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import kopf
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

if TYPE_CHECKING:
    from collections.abc import Mapping

# A pool's children are applied by its task one after the other.
MOST_CONNECTIONS = 32


class ConnectionFailed(Exception):
    """Neither a service account nor a usable kubeconfig."""


async def load(environ: Mapping[str, str] = os.environ) -> Configuration:
    """Raise ConnectionFailed."""
    configuration, loaders = Configuration(), _untyped(config)
    file = environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    try:
        if "KUBECONFIG" not in environ and "KUBERNETES_SERVICE_HOST" in environ:
            loaders.load_incluster_config(configuration)
        else:
            await loaders.load_kube_config(
                file, client_configuration=configuration, persist_config=False
            )
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConnectionFailed(
            f"no login at a Kubernetes API server: {error}; run as a pod with a service account,"
            " or name a kubeconfig file by KUBECONFIG"
        ) from error
    configuration.connection_pool_maxsize = MOST_CONNECTIONS
    # As kopf: else ~/.netrc would be read for each request.
    configuration.client_session_kwargs = {"trust_env": False}
    return configuration


def _untyped(module: Any) -> Any:
    return module


async def login(environ: Mapping[str, str] = os.environ) -> kopf.ConnectionInfo:
    """Raise kopf.LoginError."""
    try:
        found = await load(environ)
    except ConnectionFailed as error:
        raise kopf.LoginError(str(error)) from error
    header = await found.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (header or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        username=found.username or None,
        password=found.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
        proxy_url=found.proxy,
    )

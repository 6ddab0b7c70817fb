"""The API server's address and login, for kopf's watches and for our own requests.

In: the pod's service account, else $KUBECONFIG, else ~/.kube/config. Out: a Configuration of the
official client, which rereads a service account's token before it expires; and the same for kopf,
which logs in again after each 401.

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

# A pool's task applies its children one after the other, so few connections are needed.
MOST_CONNECTIONS = 32


class ConnectionFailed(Exception):
    """There is neither a service account nor a usable kubeconfig. The message is one line."""


async def load(environ: Mapping[str, str] = os.environ, context: str = "") -> Configuration:
    """`context` is one of the kubeconfig; "" is its current one. Raise ConnectionFailed if there is
    no login."""
    configuration, loaders = Configuration(), _untyped(config)
    file = environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    try:
        in_pod = "KUBECONFIG" not in environ and "KUBERNETES_SERVICE_HOST" in environ
        if in_pod and not context:
            loaders.load_incluster_config(configuration)
        else:
            await loaders.load_kube_config(
                *(file, context or None),
                client_configuration=configuration,
                persist_config=False,
            )
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConnectionFailed(
            f"no login for a Kubernetes API server: {error}; run as a pod with a service "
            "account, or set KUBECONFIG to a kubeconfig file"
        ) from error
    configuration.connection_pool_maxsize = MOST_CONNECTIONS
    # As in kopf; otherwise each request would read ~/.netrc.
    configuration.client_session_kwargs = {"trust_env": False}
    return configuration


def _untyped(module: Any) -> Any:
    return module


async def login(environ: Mapping[str, str] = os.environ) -> kopf.ConnectionInfo:
    """Raise kopf.LoginError if there is no login."""
    try:
        configuration = await load(environ)
    except ConnectionFailed as error:
        raise kopf.LoginError(str(error)) from error
    header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (header or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )

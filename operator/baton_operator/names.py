"""Names, labels, annotations and ports of a pool's objects that several folders share.

In: nothing. Out: names, and labels and annotations in our own domain, which no other tool sets. The
builders write them; the cache and the status read them.
"""

from __future__ import annotations

import re
from typing import Literal

API_VERSION = "baton.dev/v1alpha1"
POOL_KIND = "InferencePool"
SCALER_KIND = "PoolScaler"
OPERATOR = "baton-operator"  # an installation's name if its chart gives no other
# A Service's name has at most 63 characters; the longest suffix is "-kv-data-63".
LONGEST_POOL_NAME = 40
POOL_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)

Component = Literal["auth", "prefill", "decode", "router", "kv-index", "kv-data"]
STORE = ("kv-index", "kv-data")

NODE_PORT = 9000
ROUTER_PORT = 8000  # the default of `baton router`
FETCH_CONTAINER = "fetch-model"  # a node's init container
WAKE_WAIT_FLAG = "wake-wait"  # a router's: seconds it holds a request while there is no node
TOKEN_KEY = "link-token"  # in the pool's own Secret
DRAIN_S = 60  # seconds for running answers after SIGTERM: 2,000 tokens at 30 ms each

OWN_PREFIX = "baton.dev/"  # of our labels and annotations
POOL_LABEL = f"{OWN_PREFIX}pool"
COMPONENT_LABEL = f"{OWN_PREFIX}component"
REVISION_LABEL = f"{OWN_PREFIX}revision"  # of nodes
INSTANCE_LABEL = f"{OWN_PREFIX}instance"  # of data servers of the store
CREDENTIALS_ANNOTATION = f"{OWN_PREFIX}credentials"
# On the pod of a node that must go: since when (RFC 3339, UTC), and why this node.
DRAIN_SINCE_ANNOTATION = f"{OWN_PREFIX}drain-since"
DRAIN_REASON_ANNOTATION = f"{OWN_PREFIX}drain-reason"
# In a roll-out: the seconds that its requests may take, and the revision that replaces it.
DRAIN_SECONDS_ANNOTATION = f"{OWN_PREFIX}drain-seconds"
REPLACED_BY_ANNOTATION = f"{OWN_PREFIX}replaced-by"


def child_name(pool: str, component: Component) -> str:
    """The name of the component's objects; revisions and instances append theirs."""
    return f"{pool}-{component}"

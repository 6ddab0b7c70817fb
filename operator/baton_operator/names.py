"""What several folders must spell alike: names, labels, ports of a pool's objects.

In: nothing. Out: labels and annotations of our own domain, which no other tool sets, and names.
Builders write them, the cache and the status read them back.
"""

from __future__ import annotations

import re
from typing import Literal

API_VERSION = "baton.dev/v1alpha1"
POOL_KIND = "InferencePool"
SCALER_KIND = "PoolScaler"
# With "-kv-data-63" a Service's name, which 63 characters are allowed for.
LONGEST_POOL_NAME = 40
POOL_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)

Component = Literal["auth", "prefill", "decode", "router", "kv-index", "kv-data"]
STORE = ("kv-index", "kv-data")

NODE_PORT = 9000
ROUTER_PORT = 8000  # as on a laptop
FETCH_CONTAINER = "fetch-model"  # a node's init container
WAKE_WAIT_FLAG = "wake-wait"  # a router's: so long it holds a request while there is no node
DRAIN_S = 60  # running answers after SIGTERM: 2,000 tokens at 30 ms each

OWN_PREFIX = "baton.dev/"  # of labels and annotations
POOL_LABEL = f"{OWN_PREFIX}pool"
COMPONENT_LABEL = f"{OWN_PREFIX}component"
REVISION_LABEL = f"{OWN_PREFIX}revision"  # of nodes
INSTANCE_LABEL = f"{OWN_PREFIX}instance"  # of servers for KV bytes
CREDENTIALS_ANNOTATION = f"{OWN_PREFIX}credentials"
# Of a node's pod that is to go: since when (RFC 3339, UTC), and why this one.
DRAIN_SINCE_ANNOTATION = f"{OWN_PREFIX}drain-since"
DRAIN_REASON_ANNOTATION = f"{OWN_PREFIX}drain-reason"
# In a roll-out: how long its requests may take, and which revision takes its place.
DRAIN_SECONDS_ANNOTATION = f"{OWN_PREFIX}drain-seconds"
REPLACED_BY_ANNOTATION = f"{OWN_PREFIX}replaced-by"

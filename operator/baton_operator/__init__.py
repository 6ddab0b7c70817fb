"""The Kubernetes operator. It turns InferencePools into the objects that serve them.

controller   the process: one task per pool, and the reconcile of one pool
status       conditions, messages and events of a pool; pure
drain        drains nodes and removes each one when it has no requests left
autoscaling  node counts from the reports of routers, nodes and cluster; the decision itself is in
             its `planner`, which is pure
rollout      how many nodes of each revision may exist now
state        pools and children as last observed, and the contents of the pool's index
builders     a pool's objects as manifests; pure
api          spec and status: records, validation rules and CRDs
kube         access to the Kubernetes API: client, kinds, lease, permissions, egress
metrics      the operator's Prometheus metrics
names        names that several folders share
logs         log lines
"""

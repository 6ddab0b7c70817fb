"""The Kubernetes operator: from InferencePools to the objects that serve them.

controller   the process: a task per pool, one reconcile of one pool
status       what is said of a pool: conditions, messages, events; pure
drain        takes nodes out, one by one, when they have nothing left
autoscaling  from what routers, nodes and the cluster report to counts of nodes; its `planner`
             decides, pure
rollout      how many nodes of which revision there may be now
state        pools and children as last seen, and what the pool's index tells
builders     what a pool consists of, as manifests; pure
api          what a user may write, and what is written back: records, CRDs, rules
kube         requests to the Kubernetes API: client, kinds, lease, permissions, egress
metrics      the operator's Prometheus page
names        names that several folders spell alike
timestamps   times as Kubernetes writes them
logs         log lines
"""

"""From what routers, nodes and the cluster say to the planner's counts, and to the pool.

    policy        the spec as the planner's rules
    demand        routers' reports over a window as a demand; `latency`: percentiles of their counts
    node_metrics  nodes' reports as gauges, and as samples to learn from
    node_views    pods and gauges as the planner's nodes
    desired       how many nodes are wanted now, before the next decision
    pool_scalers  counts that others want, through PoolScaler
    autoscaler    one look: the planner asked, the pool with its counts, what is said of it
    planner       how many nodes of each role there should be, and why

All but autoscaler and pool_scalers are pure.
"""

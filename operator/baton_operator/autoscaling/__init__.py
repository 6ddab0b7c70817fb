"""Computes a pool's node counts from the reports of routers, nodes and cluster.

    policy        the planner's policy from the spec
    demand        the demand in a time window from the routers' reports; `latency`: percentiles
    node_metrics  gauges, and samples to learn from, from the nodes' reports
    node_views    the planner's nodes from pods and gauges
    desired       the desired numbers before the next decision
    pool_scalers  counts that external autoscalers set through PoolScalers
    autoscaler    runs the planner for a pool and applies its counts
    planner       how many nodes of each role there should be, and why

All but autoscaler and pool_scalers are pure.
"""

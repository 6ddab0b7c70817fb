"""Computes a pool's node counts from the reports of routers, nodes and cluster.

    autoscaler      runs the planner for a pool and applies its counts
    policy          the planner's policy from the spec
    demand          the demand in a time window from the routers' reports
    node_metrics    gauges, and samples to learn from, from the nodes' reports
    observed_nodes  the planner's nodes from pods and gauges
    planner         how many nodes of each role there should be, and why
    pool_scalers    counts that external autoscalers set through PoolScalers

All but autoscaler and pool_scalers are pure.
"""

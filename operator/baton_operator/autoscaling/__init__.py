"""From what routers, nodes and the cluster say to the planner's counts, and to the pool.

policy      the spec as the planner's rules
demand      routers' reports over a window as a demand; `latency`: percentiles of their counts
gauges      nodes' reports as gauges and as samples to learn from
fleet       pods and gauges as the planner's nodes
desired     how many nodes are wanted now, before the next decision
autoscaler  one look: the planner asked, the pool with its counts, what is said of it

All but the last are pure.
"""

"""Removes surplus nodes and nodes of older revisions: chosen, drained, then exactly those removed.

victims  chooses the least loaded nodes, and gives the reason
steps    decides whether a node may go now, and how far a Deployment may be scaled down
marks    annotations on a pod from which the next operator continues
routers  asks the pool's routers to drain a node, or to use it again
view     what a decision needs to know of the pool and of each of its Deployments
drainer  combines them: one drain step of one pool
"""

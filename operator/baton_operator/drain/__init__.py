"""How nodes go that are too many, or of an older revision: chosen, drained, then exactly those.

victims  who has least to lose, and why
steps    what to do now, and how far a Deployment may be lowered
marks    what an operator leaves at a pod, so that the next one goes on from there
routers  tells the pool's routers to drain a node, or to use it again
drainer  puts them together: one look at one pool, and the records it is decided from
"""

"""Moves a pool's nodes from one revision to the next while the pool keeps serving. Pure.

role_nodes  how many nodes of each revision a role has now
budget      how many of the wanted nodes a GPU budget allows
targets     how many nodes of each revision there should be now
goal        the same for a pool's Deployments, read from its children
"""

"""Moves a pool's nodes from one revision to the next while the pool keeps serving.

goal  how many nodes of each revision there should be now, within the GPU budget; pure
"""

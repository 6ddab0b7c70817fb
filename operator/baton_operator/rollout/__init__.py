"""How a pool's nodes get from one revision to the next without a moment in which nobody answers.

goal  how many nodes of which revision there shall be now, within the GPU budget: pure
"""

"""How a pool's nodes get from one revision to the next without a moment in which nobody answers.

records     what is known of each role's nodes, and how many there shall be now
gpu_budget  how many of the wanted nodes the GPU budget allows
targets     the numbers: pure
goal        from a pool's children to what is known, and how many replicas there shall be
"""

"""Quantized weights of linear layers: how they are in checkpoints and in memory, and their
products. A layout is one module and one line of `weight_format.LAYOUTS`."""

"""The layers of a model, and their kernels."""

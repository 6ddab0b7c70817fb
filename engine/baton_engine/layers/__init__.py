"""Parts of a model, and their kernels."""

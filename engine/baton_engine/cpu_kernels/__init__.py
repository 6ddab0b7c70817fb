"""Kernels for CPUs, which numba compiles when a node starts.

Each number is computed by the same instructions in the same order wherever it is, so its bits do
not depend on the numbers beside it.
"""

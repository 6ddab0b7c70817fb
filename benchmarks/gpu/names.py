"""Names of measurements that one part of `make gpu` makes and another, or a document, refers to."""

from __future__ import annotations

COPY = "copy bandwidth"  # GB/s
GEMM = "bf16 products"  # TFLOP/s
LAUNCH = "launch from the host"  # us
REPLAY = "launch in a graph"  # us

# Of the part `speed`.
WORKLOAD = "nano-vllm's workload"  # tokens/s
ONE_BY_ONE = "the workload, times transformers one by one"

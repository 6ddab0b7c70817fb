"""Triton kernels, each with a torch twin beside it or in the part of the engine that it speeds up.

Only `choice` and `ops` are imported before `TorchSettings.kernels` chooses triton: torch wheels for
CPUs bring no triton. Under TRITON_INTERPRET=1, set before triton is imported, kernels run on a CPU,
far too slowly for use but exactly enough for tests; bfloat16 is silently wrong there.
"""

"""Attention whose bits do not depend on the batch: `backend.TorchAttention` and its parts."""

"""The paged KV cache: block pool, its tensors, and the copy in host memory."""

"""The paged KV cache: the block pool, its tensors, and the host tier."""

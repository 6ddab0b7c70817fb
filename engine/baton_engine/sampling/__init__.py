"""Sampling: from logits to token ids and logprobs."""

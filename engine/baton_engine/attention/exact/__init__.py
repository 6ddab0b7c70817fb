"""Attention whose bits do not depend on the batch: `backend.ExactAttention` and its parts."""

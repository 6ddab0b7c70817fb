"""Qwen3: Llama with normalised heads of q and k, and optional sliding windows."""

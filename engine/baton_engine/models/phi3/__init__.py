"""Phi-3: Llama with fused projections in the checkpoint, partial rope and longrope."""

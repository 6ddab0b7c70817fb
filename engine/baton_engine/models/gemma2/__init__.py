"""Gemma 2: soft caps, alternating windows, norms around attention and MLP, scaled embeddings."""

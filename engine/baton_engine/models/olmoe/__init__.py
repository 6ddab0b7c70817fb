"""OLMoE: experts in every layer; norms of all of q and of all of k, and bounds of q, k and v."""

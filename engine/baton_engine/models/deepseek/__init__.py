"""DeepSeek V2 and V3: a latent cache, and experts chosen from groups, after some dense layers."""

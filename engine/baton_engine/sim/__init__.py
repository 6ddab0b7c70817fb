"""The simulated engine: real blocks and KV bytes, and a timing model. No torch."""

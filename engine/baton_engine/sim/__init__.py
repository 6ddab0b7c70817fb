"""The simulated engine: real blocks and bytes, a timing model. No torch."""

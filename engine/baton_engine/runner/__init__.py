"""The Runner on torch: one step of a batch on real weights."""

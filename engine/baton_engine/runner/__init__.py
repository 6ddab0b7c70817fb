"""The torch Runner: computes one step of a batch on real weights."""

"""Heads that draft tokens from the target's hidden states: EAGLE, EAGLE-3, MTP and Medusa."""

"""Mixtral: Mistral with experts in every layer."""

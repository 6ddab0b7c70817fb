"""Anthropic's Messages API: its fields, its answers, and how a body becomes a conversation."""

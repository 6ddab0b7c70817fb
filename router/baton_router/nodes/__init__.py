"""The router's knowledge of its nodes: links, loads, cached prefixes, model files."""

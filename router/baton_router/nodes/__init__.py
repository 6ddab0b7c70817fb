"""What the router knows of its nodes: links, loads, cached prefixes, model files."""

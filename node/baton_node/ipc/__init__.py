"""How the server process and the engine process of a node talk to each other."""

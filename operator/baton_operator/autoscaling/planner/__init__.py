"""How many nodes of each role a pool should have. Pure: no clock, no cluster, no I/O."""

"""How many nodes of each role a pool should have. Pure: no clock, no cluster, no I/O.

plan            the rules in their order, and the decision with its reason and message
inputs          what is observed of a pool, and what its owner wants
reasons         every reason of a decision, explained
memory          what the planner remembers from one call to the next
capability      what one node can do, learnt from reports
forecast        the load now, and when a new node would serve
load_model      how many replicas the load needs
recommendation  the same corrected by measurements; what is unknown
replica_limits  minima, maxima, ratio and GPU budget
replica_pair    the best numbers of both roles within these
behavior        stabilization windows, rates, and fall-backs
consolidation   whether fewer nodes would meet the targets
scale_to_zero   when a pool sleeps and wakes
"""

"""The number of equal servers that keeps a wait short.

In: offered load, service time, the allowed wait, the share that must not wait longer. Out: the
smallest number of servers.

The router gives a prompt to the node where it waits least, which is the same as one queue for all
nodes (least work left = M/G/n; Harchol-Balter, Performance Modeling and Design, chapter 24). Prompt
lengths vary about as much as an exponential distribution, so M/M/n is used (ibid., chapter 14):

    P(wait > t) = C(n, a) exp(-(n - a) t / S)

with the offered load a = arrivals x S, and C by Erlang: C = B / (1 - (a / n)(1 - B)),
B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)).
"""

from __future__ import annotations

from math import exp

# No pool has more nodes in a role; a search that reaches it means "at least this many".
MOST = 10_000


def servers_for(load: float, service_s: float, wait_s: float, share: float) -> int:
    """The smallest n for which at least `share` of the prompts wait no longer than `wait_s`. `load`
    is the number of servers that would always be busy; 0 needs none."""
    if load <= 0.0:
        return 0
    blocked = 1.0
    for n in range(1, MOST):
        blocked = load * blocked / (n + load * blocked)
        if n <= load:
            continue
        waits = blocked / (1.0 - load / n * (1.0 - blocked))
        rate = (n - load) * wait_s / service_s if service_s > 0.0 else float("inf")
        if waits * exp(-rate) <= 1.0 - share:
            return n
    return MOST

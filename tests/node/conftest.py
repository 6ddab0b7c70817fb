"""Each test gets a store in the state of a new one, and nodes on it."""

from tests.support.nodes.step_loops import make_node
from tests.support.stores.node_stores import one, single, store, two

__all__ = ["make_node", "one", "single", "store", "two"]

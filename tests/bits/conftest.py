"""Each test gets a store in the state of a new one."""

from tests.support.stores.node_stores import store, two

__all__ = ["store", "two"]

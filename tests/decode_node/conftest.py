"""Each test finds a store as if it had just been started."""

from tests.support.stores.node_stores import one, single, store, two

__all__ = ["one", "single", "store", "two"]

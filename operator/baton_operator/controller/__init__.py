"""Reconciles pools: the process, one task per pool, and the reconcile itself.

app            the process: wires everything together and runs until SIGTERM
settings       settings of the process
pool_task      one asyncio task per pool
due_time       when a pool's reconcile, or the next read of its index, is due
reconcile      reconciles one pool
ownership      which of several operators manages a pool
pool_secret    the pool's credentials, as last read or applied
diff           the actions that bring a pool's children to their desired state; pure
applier        takes these actions
status_writer  writes the pool's status and events
index_poller   reads the pool's index concurrently with reconciles
"""

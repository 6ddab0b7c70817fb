"""Reconciles pools: the process, one task per pool, and the reconcile itself.

app            the process: wires everything together and runs until SIGTERM
pool_task      one asyncio task per pool, and its schedule
reconcile      reconciles one pool: computes and applies the difference
status_writer  writes the pool's status and events
index_poller   reads the pool's index concurrently with reconciles
settings       settings of the process
"""

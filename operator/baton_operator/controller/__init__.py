"""Reconciles pools: the process, a task per pool, and what it applies.

app            the process: composes everything, lives until SIGTERM
pool_task      one asyncio task per pool, and when it is due
reconcile      one look at one pool: what differs, applied
status_writer  writes the pool's status and its events
index_poller   asks the pool's index beside that
settings       what an operator is told when it starts
"""

"""Reconciles pools: the process, a task per pool, and what it applies.

app            the process: composes everything, lives until SIGTERM
pool_task      one asyncio task per pool, `schedule` when it is due
reconcile      one look at one pool; `diff` what differs, `status_writer` what is said of it
index_poller   asks the pool's index beside that
settings       what an operator is told when it starts
"""

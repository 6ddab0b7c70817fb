"""Pools and their objects as last observed, and what a pool's index reports.

watch         kopf's watches fill the cache
cache, child  the pools and their children as last observed
resync        compares the cache with the API server
observed      the records that reconciling and status read; readers makes them from objects
pod_problem   why a pod does not become ready
hosts         pools that route the same host name
index_reader  reads a pool's index; index_timing says when, lookups resolves its host name
decision_log  the planner's decisions, written to the index for people
store_check   what is wrong with an external store
"""

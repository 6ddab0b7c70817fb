"""The Kubernetes API as the operator uses it.

client, objects  requests, and the objects in them
connection       the API server's address and login
kinds            the kinds of objects that the operator uses; permissions follows from them
lease            leader election
egress           addresses of external indexes that the operator may connect to
"""

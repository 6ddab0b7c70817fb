"""The Kubernetes operator's room: from an InferencePool to the objects that serve it.

Here now, pure and tested without a cluster:

    spec      what a user may write: typed records, errors that name the field
    pool      one InferencePool as read from the API: name, owner, spec, images
    builders  what a pool consists of: manifests of its nodes, router and KV store

Not here yet: the CRD (it will be generated from `spec`), the kopf handlers that apply manifests,
prune and write status, the chart. Until they come nothing in this room talks to Kubernetes.
"""

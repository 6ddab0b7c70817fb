"""The Kubernetes operator's room: from InferencePools to the objects that serve them.

What is wanted, pure:
    spec      what a user may write: typed records, errors that name the field; `crd`, `schema`
    pool      one InferencePool as read from the API: name, owner, spec, images, credentials
    builders  what a pool consists of: manifests of its nodes, router, KV store, policies, routes
    planner   how many nodes there should be, and why; `autoscaling` feeds it
    rollout   how many nodes of which revision there may be now
    plan      what is to be done: manifests against children

What is there:
    kinds     which kinds of objects there are, and where; `permissions` follow from it
    observed  the little that is kept of a child; `pod_problems`
    cache     pools and children as last seen
    index     nodes and fetches, as the pool's Redis index tells; `index_asker`
    gpus      how many a pod holds; `moments`: how long ago something was
    status    what is said of a pool

What happens:
    watch     kopf lists and watches, and fills the cache
    resync    looks at everything now and then, whatever the watches say
    queue     which pool is next, and when; `work` takes it from there
    reconcile one look at one pool: apply, prune, and `report` its status
    drain     takes nodes out, one by one, when they have nothing left
    scaling   what others want a role to have, through its PoolScaler
    api       requests; `connection` to whom
    lease     which of several replicas acts
    app       all of it as a process; `settings`, `metrics`, `logs`
"""

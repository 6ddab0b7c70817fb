"""`kubectl baton`: commands about a pool on Kubernetes.

main          the command line
cluster       what they ask of the API server, by way of kubectl
pool_routers  a pool's routers, reached through port forwards
why_text      a pool's status, in sentences
"""

"""The Kubernetes API: client, kinds of objects, lease, permissions. Knows no pool."""

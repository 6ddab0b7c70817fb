"""The Kubernetes API: client, kinds of objects, lease, permissions. Independent of pools."""

"""Derives a pool's status, conditions and events from what was observed of it.

conditions       every condition type and every reason, with its meaning (docs/conditions.md)
condition_kinds  the records of which `conditions` is made
view             the pool's desired and observed state, as the findings need them
findings/        what each condition says
derive           the current status
urls             its URLs
autoscaling      its part about the planner's decision
events           events for changes between two statuses
pod_events       why a pod's volumes, secrets or network are missing, from Kubernetes' events
flag_fields      which field of the spec a container's error is about
"""

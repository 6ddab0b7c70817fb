"""Derives a pool's status, conditions and events from what was observed of it.

conditions  every condition type and every reason, with its meaning (docs/conditions.md)
derive      the current status from a View; one function per condition
events      events for changes between two statuses; the reasons, from Kubernetes' events, why a
            pod's volumes, secrets or network are missing
"""

"""What is said about a pool, derived from what was observed of it.

conditions  every type of condition and every reason, with what it means (docs/conditions.md)
derive      the status now, from a View (what is wanted, what is there): one function per condition
events      what a user is told between two statuses; why a pod's volumes, secrets or network are
            not there, as Kubernetes' events say
"""

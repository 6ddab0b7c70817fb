"""What is said about a pool, derived from what was observed of it. Pure.

records     the status as written to the API; the CRD's schema comes from it
conditions  every type and reason of condition, with what it means (docs/conditions.md)
derive      the status now; below it: view (what is wanted and there), parts (one function per
            condition), progress (of a model's fetch), autoscaling (the planner's word),
            addresses
events      what a user is told of between two statuses
"""

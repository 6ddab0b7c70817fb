"""The types of the API: spec and status of InferencePool and PoolScaler, and their CRDs.

spec            an InferencePool's `spec`. Its parts: model, nodes, router, store, autoscaling,
                network_policy
spec_reader     reads a spec, and explains what is wrong with it
pod_templates   checks of its pod templates
pool            a pool as the other folders use it: spec, installation, credentials
status, scaler  an InferencePool's `status`; a PoolScaler
crd, schema     the CRDs, generated from the records

Of these the records are made: record (their base), fields, flags, resources, secrets, cel (rules),
schema_extras.
"""

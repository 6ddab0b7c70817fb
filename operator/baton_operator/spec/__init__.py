"""What a user may write in an InferencePool, and how it is read.

records   the fields: types, defaults, descriptions; the CRD is generated from them
store     those of the KV store
autoscaling  who says how many nodes there are
record    what all records are
values    kinds of values that are more than a text or a number
rules     what the API server checks beyond types, with what to write instead
flags     the command-line flags that are the operator's own
quantity  Kubernetes' quantities as numbers
read      an object of the API as a PoolSpec, or SpecError in one line
"""

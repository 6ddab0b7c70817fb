"""The types of the API: spec and status of InferencePool and PoolScaler, and their CRDs."""

"""Vectors of texts and scores of pairs: /v1/embeddings, /score and /rerank."""

"""Capture without a GPU: a recorder with the interface of a CUDA graph, and what finds before a capture that it cannot hold."""

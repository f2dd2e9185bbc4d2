"""Retrievers other than BM25; BM25's index on disk; retrieval from another machine over HTTP."""

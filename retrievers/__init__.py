"""Retrievers other than BM25, among them one that asks another machine, and its server."""

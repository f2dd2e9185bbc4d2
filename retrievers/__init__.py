"""Retrievers other than BM25. `retriever.make_retriever` creates them."""

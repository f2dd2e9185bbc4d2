"""Retrievers beside BM25; the door is retriever.make_retriever."""

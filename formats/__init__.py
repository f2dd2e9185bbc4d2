"""Reads files in many layouts (entry points: data.load_questions, data.load_corpus)."""

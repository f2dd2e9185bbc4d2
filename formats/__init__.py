"""Files in anybody's layout -> records; the door is data.load_questions and data.load_corpus."""

"""Models that are asked and never trained: summariser, judge, reader; the door is plumbing."""

"""Models that are asked but never trained: summariser, judge, reader of evidence."""

"""Models other than the policy, asked but not trained: judge, reader of evidence, summariser."""

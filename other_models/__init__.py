"""Other models, which RL asks and does not train: judge, reader of evidence, summariser."""

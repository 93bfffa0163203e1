"""The evaluator: holds what agents say about their decisions against what the log says."""

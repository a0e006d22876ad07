"""Property tests: one state machine over the whole cache."""

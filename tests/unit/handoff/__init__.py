"""Unit tests of kvseal/handoff."""

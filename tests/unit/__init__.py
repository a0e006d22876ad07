"""Unit tests; they mirror the tree of `kvseal`."""

"""Unit tests of the cache; they mirror `kvseal/kv`."""

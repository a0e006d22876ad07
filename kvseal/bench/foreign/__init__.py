"""Scripts that another engine's own Python runs, each standing alone; started by `kvseal.bench.suite.foreign`."""

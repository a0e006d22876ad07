"""One small file per attention family: a config's fields in, a list of layers out. Chosen by `kvseal.plan.classes`."""

"""A Batch becomes tokens: backend protocol, arena, weights, model description, sampler, runner.

Never decides what runs, never sees the scheduler. Imports `core`, `kv.geometry`, `kv.seal` and NumPy.
"""

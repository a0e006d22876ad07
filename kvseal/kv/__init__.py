"""Who owns which page: geometry, seal, pool, handles, block table, radix tree, prefix cache, capacity, manager.

Does no I/O, has no clock, never touches payload bytes (K and V). Imports `core` and NumPy.
"""

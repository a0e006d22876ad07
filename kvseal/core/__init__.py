"""The words of KVSeal: ids, laws, errors, clock, request, outcome, batch, config.

Owns the vocabulary that every other house speaks. Imports the standard library only and does no I/O
(``config`` alone may read the environment).
"""

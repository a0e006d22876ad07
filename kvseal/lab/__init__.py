"""The laboratory: engines and models with no weights, on which the rest is broken on purpose.

Owns test doubles that are part of the product (they ship, so that anybody can repeat an experiment). Nothing of the server imports it.
"""

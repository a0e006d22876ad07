"""The auditor: can it happen to your server?

Looks at any OpenAI-compatible endpoint from outside, and at what its operator can show (log, metrics, installed packages). Imports nothing
of the engine: a fault of ours must not be able to hide a fault of ours.
"""

"""Pages move between nodes and prove it: messages, sessions, transports.

Owns the hand-off from the intent to the receipt. Imports `core` and `kv` alone; never schedules, never computes, never sees a request's
text. Laws: L3, L4, L5, L7, L8, L9, L10, L11.
"""

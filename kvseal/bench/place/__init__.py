"""Placement: how many workers should share each request, and how many should part prefill from decode, for a load and its limits.

Owns the latency model, the event simulation of whole placements with the engine's own scheduler, and the search. It stands in `bench`
because only a watcher may see every floor at once: it drives `sched` and `kv` as they are, and nobody but the command line imports it.
"""

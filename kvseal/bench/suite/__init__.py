"""What the benchmarks share: entries of the scoreboard, reports, workloads, and runs on the engine. No command of its own.

Owns nothing itself. `board` is the data, `command` reads flags and writes reports, `workloads` makes prompts, `rig` runs them.
"""

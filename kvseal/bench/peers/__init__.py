"""KVSeal beside every other CPU engine that runs on this machine: ``kvseal bench peers`` (figure 14 of the performance notes).

Owns nothing itself. `command` reads the flags, `catalogue` knows the peers, `setup` installs them in environments of their own, `engines`
runs them, `schedule` interleaves the repetitions, `figures` takes medians and ratios, `report` shows them. Nothing of a peer is ever
imported into KVSeal's environment: `worker` is a script that a peer's own Python runs.
"""

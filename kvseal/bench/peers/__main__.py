"""``kvseal bench peers`` as a module."""

from kvseal.bench.peers.command import main

if __name__ == "__main__":
    raise SystemExit(main())

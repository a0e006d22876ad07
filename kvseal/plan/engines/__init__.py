"""How each engine turns memory into a pool, and what it prints. One file (or a few) per engine; none knows another."""

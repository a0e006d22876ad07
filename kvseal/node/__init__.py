"""One process that serves: engine loop, its supervisor and client, and `build`, the only file that names concrete parts."""

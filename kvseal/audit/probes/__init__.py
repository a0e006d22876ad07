"""The probes: one file each. A probe asks, looks at what came back, and says what it proved, what it could not, and how sure it is."""

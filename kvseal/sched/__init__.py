"""What runs next: sequence states, policy, scheduler. Pure and synchronous: no I/O, no array, no clock but the one handed in."""

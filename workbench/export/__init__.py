"""Plans as folders that launch under other training systems: one module a system, listed in `registry`."""

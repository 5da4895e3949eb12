"""Export plans as folders that launch under other training systems: one module per system, listed in
`registry`.
"""

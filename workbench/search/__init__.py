"""Search for the fastest plan that fits.

Called, `workbench.search(job)` ranks the plans of all strategies: see `search` of `workbench.api`.
"""

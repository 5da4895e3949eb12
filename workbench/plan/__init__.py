"""The plan, and the one lowering from it to what machines need.

Called, `workbench.plan(job)` plans a job: see `plan` of `workbench.api`.
"""

"""Shared parts of both versions of the Cornstarch paper: models, plans, pipelines, attention."""

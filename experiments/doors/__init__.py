"""Interfaces of the workbench: imported models, exported folders, and ingested traces."""

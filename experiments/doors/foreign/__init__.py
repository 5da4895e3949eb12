"""Programs that run in the environments of other training systems, with their packages."""

"""The doors of the workbench: models that come in, folders that launch, traces that come back."""

"""Programs that run in the environments of other people's simulators, not in this project's."""

"""Processes, devices, clocks and communicators: where ranks run and how they talk."""

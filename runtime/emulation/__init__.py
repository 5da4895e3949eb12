"""All ranks of a plan on one device, one action at a time."""

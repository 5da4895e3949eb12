"""A fuzzer of whatever the program reads and of every message that it receives."""

"""A fuzzer of everything that the program reads and every message that it receives."""

"""The fuzzed targets: readers and messages, by part of the program."""

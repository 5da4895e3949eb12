"""What is fuzzed: per room of the program, its readers and the messages that it receives."""

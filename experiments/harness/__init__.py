"""The parts of an experiment: printed numbers, evidence, verdicts, figures, and one command line."""

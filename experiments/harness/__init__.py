"""What an experiment is made of: printed numbers, evidence, verdicts, figures, and one command line."""

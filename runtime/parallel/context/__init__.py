"""Context parallelism: ranks that share the tokens of a stage."""

"""Expert parallelism: ranks that share the experts of a stage."""

"""Training that outlives its nodes: survivors keep their state, get a new plan and repeat the step."""

"""What the planner knows of each family of models; `registry` lists them."""

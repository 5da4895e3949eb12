"""The planner's knowledge of each family of models; `registry` lists them."""

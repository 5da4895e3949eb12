"""From a plan and a cost model to seconds of every action, and whether the plan can be run."""

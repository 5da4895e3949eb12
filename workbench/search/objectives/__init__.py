"""What a search makes small: steps over data that vary, goodput where nodes fail, dollars; Pareto fronts."""

"""The joint search beside every strategy's own: jobs, baselines, exhaustive spaces, executed plans."""

"""The joint search and every strategy's own: jobs, baselines, exhaustive spaces, executed plans."""

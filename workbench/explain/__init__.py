"""Why a step takes as long as it does: its critical path, its idle time, and what would shorten it."""

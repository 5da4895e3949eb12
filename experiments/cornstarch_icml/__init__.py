"""Tables and figures of Cornstarch, ICML version."""

"""Tables and figures of Cornstarch, arXiv v1."""

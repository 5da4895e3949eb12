"""The report's page: a template, its style, and JavaScript modules that Python puts into one file."""

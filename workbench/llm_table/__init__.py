"""Text-only language models described by one row of a table, priced through an ordinary plan."""

"""Language models described by rows of a table, priced through ordinary plans."""

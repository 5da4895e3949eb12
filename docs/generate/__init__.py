"""Pages that are made from the code and from result files, so that they cannot drift from them."""

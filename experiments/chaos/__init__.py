"""Everything that runs for long under faults from outside: what is lost, left over, wrong or unnamed."""

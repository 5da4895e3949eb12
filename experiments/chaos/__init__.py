"""Long-running programs under external faults: what is lost, left over, wrong or unexplained."""

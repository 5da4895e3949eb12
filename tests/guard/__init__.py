"""What must not change while code moves: plans, times, memory, losses and weights, held to the last bit."""

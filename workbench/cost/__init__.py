"""What a layer, a message or a collective costs in seconds and bytes."""

"""What runs in the environments of other training systems, beside their packages."""

"""What datasets and functions hold: digests of it, copies that can be put back, and what reading changes in it."""

"""What a user's sampler holds: copied, compared, and told of other ranks."""

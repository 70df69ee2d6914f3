"""Sources without random access: shards, and the torchdata nodes that read them."""

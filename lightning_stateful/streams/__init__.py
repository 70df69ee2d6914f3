"""Sources without random access: shards that are read in turn, shuffled in blocks, mixed, and cut into batches."""

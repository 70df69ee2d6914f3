"""The shards of streams, and the torchdata nodes that read, shuffle, transform and pack their samples."""

"""What a prepared set is on disk: schema, manifest, shards, ids; written and read here alone."""

"""The file format of prepared sets: schema, manifest, shards, ids. Only this package knows it."""

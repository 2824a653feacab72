"""Read and write the file format of prepared sets: schema, manifest, shards and ids."""

"""Read and write the files of prepared sets: schema, manifest, shards and vocabularies."""

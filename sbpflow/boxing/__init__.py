"""Plans conversions between layouts, and runs these plans by moving tensors between ranks."""

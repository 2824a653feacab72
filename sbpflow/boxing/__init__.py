"""Plans conversions between layouts as data and executes them by moving tensors between ranks."""

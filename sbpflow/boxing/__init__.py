"""Conversions between layouts: planned as data, then executed. It moves tensors between ranks."""

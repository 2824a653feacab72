"""Embedding tables in any layout: plans, ids, stores, exchanges, and collections."""

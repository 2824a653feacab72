"""Embedding tables for any layout: plans, ids, stores, exchanges, and collections."""

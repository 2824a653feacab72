"""Embedding tables under any layout: plan, ids, storages, exchanges, and their collection."""

"""Embedding tables under any layout: plan, storages, exchanges, and their collection."""

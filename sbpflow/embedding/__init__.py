"""Embedding tables under any layout: plan, storages, exchanges, and the collection that runs them."""

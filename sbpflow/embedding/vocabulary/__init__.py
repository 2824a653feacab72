"""Vocabularies of growing tables: which keys have rows."""

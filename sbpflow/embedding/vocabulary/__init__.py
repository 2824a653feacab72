"""Vocabularies of growing tables, which decide which keys have rows."""

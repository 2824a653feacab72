"""Annotates configuration fields, and imports users' classes."""

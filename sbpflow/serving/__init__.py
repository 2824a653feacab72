"""Scores rows with exported models."""

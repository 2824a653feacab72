"""Define sbps, placements, and layouts (their combination), without communication."""

"""Defines sbps, placements, and layouts (a layout combines a placement with sbps), without
communication."""

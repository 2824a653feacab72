"""Defines sbps, placements, and layouts (a placement plus one sbp per axis). No communication."""

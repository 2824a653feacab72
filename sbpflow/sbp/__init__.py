"""Values for layouts: sbps, placements, and layouts, which combine both. No communication."""

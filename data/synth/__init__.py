"""Generate rows with a known best AUC."""

"""Generated rows with a known best AUC."""

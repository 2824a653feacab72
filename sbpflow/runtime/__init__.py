"""The ranks that run together: how they start, find one another, report and end."""

"""The ranks that run together: their process groups, hosts, and what they sent."""

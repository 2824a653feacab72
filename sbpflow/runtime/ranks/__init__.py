"""The ranks of a run: their process groups, their hosts, and a log of what they sent."""

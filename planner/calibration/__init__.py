"""Measures step times of plans on this machine and fits a profile of prices to them."""

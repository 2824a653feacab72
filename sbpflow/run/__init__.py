"""A run as a whole: what a model is to it, its plan, how it is built and explained."""

"""Defines the model interface of a run, and adapts ordinary torch modules to this interface."""

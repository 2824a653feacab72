"""The configuration: its classes, how it is read, and its error messages. Knows no model."""

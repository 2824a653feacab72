"""The configuration: classes, reading, messages. Knows no model."""

"""Writes metrics in Prometheus' text format, version 0.0.4."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def head(name: str, kind: str, text: str) -> list[str]:
    """Return a metric's header lines: its help text and its type."""
    return [f"# HELP sbpflow_{name} {text}", f"# TYPE sbpflow_{name} {kind}"]


def line(name: str, value: float, /, **labels: str) -> str:
    """Return the line of one sample."""
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    shown = ",".join(f'{key}="{text.translate(escaped)}"' for key, text in labels.items())
    return f"sbpflow_{name}{{{shown}}} {value:.17g}" if shown else f"sbpflow_{name} {value:.17g}"

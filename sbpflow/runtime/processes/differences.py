"""Describes differences between ranks that must agree."""

from collections.abc import Mapping, Sequence

_MAX_KEYS = 5
_MAX_CHARACTERS = 60  # per value
_NOT_GIVEN = "not given"


def differences(facts: Sequence[Mapping[str, str]], others: Sequence[int]) -> str:
    """List, by key, how the facts of the ranks ``others`` differ from rank 0's; return "" if all
    agree.

    ``facts`` contains one mapping per rank.
    """
    lines: list[str] = []
    for key in sorted(set().union(*facts)):
        values = [rank_facts.get(key, _NOT_GIVEN) for rank_facts in facts]
        other = next((rank for rank in others if values[rank] != values[0]), None)
        if other is None:
            continue
        first, second = _shorten(values[0], values[other])
        lines.append(f"{key}: {first} on rank 0, {second} on rank {other}")
    if not lines:
        return ""
    more = f" and {len(lines) - _MAX_KEYS} more" if len(lines) > _MAX_KEYS else ""
    return f" ({'; '.join(lines[:_MAX_KEYS])}{more})"


def _shorten(first: str, second: str) -> tuple[str, str]:
    """Shorten two long values to the part around their first difference."""
    if max(len(first), len(second)) <= _MAX_CHARACTERS:
        return first, second
    shorter = min(len(first), len(second))
    same = next((at for at in range(shorter) if first[at] != second[at]), shorter)
    start = max(0, same - _MAX_CHARACTERS // 2)
    mark = "..." if start else ""

    def cut(text: str) -> str:
        end = start + _MAX_CHARACTERS
        return mark + text[start:end] + ("..." if len(text) > end else "")

    return cut(first), cut(second)

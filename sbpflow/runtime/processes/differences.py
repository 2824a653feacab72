"""What ranks that should agree do not agree on, in words. Pure."""

from collections.abc import Mapping, Sequence

_MOST_KEYS = 5  # of those that differ between ranks
_MOST_CHARACTERS = 60  # of a value of them
_NOT_GIVEN = "not given"


def differences(facts: Sequence[Mapping[str, str]], others: Sequence[int]) -> str:
    """Where the facts of ranks ``others`` are not those of rank 0, by key, in words; "" if none.

    ``facts`` has an entry per rank; in what order it has its keys changes nothing.
    """
    lines: list[str] = []
    for key in sorted(set().union(*facts)):
        values = [rank_facts.get(key, _NOT_GIVEN) for rank_facts in facts]
        other = next((rank for rank in others if values[rank] != values[0]), None)
        if other is None:
            continue
        mine, theirs = _cut_apart(values[0], values[other])
        lines.append(f"{key}: {mine} on rank 0, {theirs} on rank {other}")
    if not lines:
        return ""
    more = f" and {len(lines) - _MOST_KEYS} more" if len(lines) > _MOST_KEYS else ""
    return f" ({'; '.join(lines[:_MOST_KEYS])}{more})"


def _cut_apart(first: str, second: str) -> tuple[str, str]:
    """Two long values from shortly before the place where they part."""
    if max(len(first), len(second)) <= _MOST_CHARACTERS:
        return first, second
    shorter = min(len(first), len(second))
    same = next((at for at in range(shorter) if first[at] != second[at]), shorter)
    start = max(0, same - _MOST_CHARACTERS // 2)
    mark = "..." if start else ""

    def cut(text: str) -> str:
        end = start + _MOST_CHARACTERS
        return mark + text[start:end] + ("..." if len(text) > end else "")

    return cut(first), cut(second)

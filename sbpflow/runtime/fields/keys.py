"""What a key of the configuration affects and is for, as an annotation of its field."""

from dataclasses import dataclass
from typing import Literal

Affects = Literal["results", "scores", "execution"]


@dataclass(frozen=True, slots=True)
class Key:
    """A mark for ``Annotated``: what a key affects, and its line in docs/configuration.md.

    results: the loss of some step. The value must be the same when a run resumes.
    scores: evaluations only. Free to change, unless ``train.stop`` or ``train.plateau`` is set.
    execution: where, how, or how long a run executes; no loss changes beyond the rounding of sums
    in another order. Free to change.

    A field without a mark affects what its group affects; a class of a user's own, results.
    """

    affects: Affects
    line: str


def key_of(kind: type, name: str) -> Key | None:
    """The mark of a dataclass field; None if it has none, or is an annotation written as text."""
    field = getattr(kind, "__dataclass_fields__", {}).get(name)
    marks = getattr(field.type, "__metadata__", ()) if field is not None else ()
    return next((mark for mark in marks if isinstance(mark, Key)), None)

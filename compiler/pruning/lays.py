"""Channels of values, places of channels in constants, and what must change in a node when channels go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Left = Callable[[Array], Array]  # atoms -> bool: which of them stay


@dataclass(frozen=True)
class Lay:
    """The channels of a value: an axis from the right (negative), and an atom for each position along it."""

    axis: int
    atoms: Array


@dataclass(frozen=True)
class Place:
    """An axis of a constant.

    Attributes:
        role: "out" of a layer's weights, "in" of a layer's weights, "both" of weights that two layers read, or "side".
    """

    tensor: str
    axis: int
    role: str

    @property
    def made(self) -> bool:
        """Do these channels come from here?"""
        return self.role in ("out", "both")

    @property
    def read(self) -> bool:
        """Does a layer read channels here?"""
        return self.role in ("in", "both")


@dataclass(frozen=True)
class Edit:
    """An operand that counts or names channels.

    Attributes:
        node: the name of its reader.
        operand: its number.
        made: the new constant, from what stays.
    """

    node: str
    operand: int
    made: Callable[[Left], Array]


@dataclass(frozen=True)
class Extent:
    """An entry of a shape that is computed.

    Attributes:
        value, axis: whose extent it is, the axis from the left.
        atoms: of the channels along that axis; None where it has none.
        ratio: the entry over that extent.
    """

    value: str
    axis: int
    atoms: Array | None = None
    ratio: Fraction = Fraction(1)

    @property
    def size(self) -> int | None:
        """Its number, as long as all channels are there; None where only a call knows."""
        return None if self.atoms is None else int(self.atoms.size * self.ratio)


@dataclass(frozen=True)
class Written:
    """An entry of a computed shape that is written in a constant operand of a Concat."""

    number: int
    node: str
    operand: int
    at: int


Entry = int | Extent | Written | None  # None: not known


def number(e: Entry) -> int | None:
    """What an entry is before channels go; -1 and 0 as in a target of Reshape."""
    return e.number if isinstance(e, Written) else e.size if isinstance(e, Extent) else e


def channels_of(e: Entry) -> Array | None:
    """The channels that an entry counts."""
    return e.atoms if isinstance(e, Extent) else None

"""What happens to the values that a block leaves for its backward: two actions, places, selectors. Data only.

They are tagged msgspec structs rather than dataclasses so that a plan file is decoded strictly, with no code of ours.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from reforward._errors import InputError

#: Families of operations, recognised at the level of `torch.nn.functional` and tensor methods.
FAMILIES = ("matmul", "attention", "conv", "norm", "elementwise", "random")


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="is"):
    pass


class Device(_Data, frozen=True, kw_only=True, tag="device"):
    """Saved values stay where they were made."""


Place = Device


class Ops(_Data, frozen=True, kw_only=True, tag="ops"):
    """Selects the outputs of one family of operations.

    Attributes:
        family: one of `FAMILIES`.
        within: pattern on the path of a submodule; only operations that run inside it are meant. None: anywhere in
            the block.
    """

    family: str
    within: str | None = None

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise InputError(f"there is no family of operations {self.family!r}; known are {', '.join(FAMILIES)}")


class Modules(_Data, frozen=True, kw_only=True, tag="modules"):
    """Selects whole submodules: everything that they leave for backward, and their output.

    Attributes:
        pattern: glob on the submodule's full path, such as `*.gate*`.
    """

    pattern: str


Selector = Ops | Modules


def selectors(given: str | Selector | Iterable[str | Selector]) -> tuple[Selector, ...]:
    """Selectors from what a user writes: a family's name, a pattern for submodules, or a mix of them in a list.

    Raises:
        InputError: neither a known family nor a pattern (`*.mlp`).
    """
    if isinstance(given, (str, Ops, Modules)):
        given = [given]
    result: list[Selector] = []
    for item in given:
        if isinstance(item, (Ops, Modules)):
            result.append(item)
        elif not isinstance(item, str):
            raise InputError(f"a selector is a family's name, a pattern, Ops(...) or Modules(...), not {item!r}")
        elif item in FAMILIES:
            result.append(Ops(family=item))
        elif any(mark in item for mark in "*?[."):
            result.append(Modules(pattern=item))
        else:
            raise InputError(
                f"{item!r} is neither a family of operations ({', '.join(FAMILIES)}) nor a pattern for submodules;"
                f" write '*.{item}' for a submodule of that name"
            )
    return tuple(sorted(set(result), key=repr))  # a set in a fixed order: what selects the same is equal


class Save(_Data, frozen=True, kw_only=True, tag="save"):
    """Everything that backward needs is kept, as without checkpointing.

    Attributes:
        at: where the values live until backward.
    """

    at: Place = Device()

    def __post_init__(self):
        _check_place(self.at)


class Recompute(_Data, frozen=True, kw_only=True, tag="recompute"):
    """Only the block's inputs are kept, and what `save` selects; the rest is computed again when backward needs it.

    Attributes:
        save: what is kept beside the inputs; text is accepted as in `selectors`.
        at: where the kept values live until backward.
    """

    save: tuple[Selector, ...] = ()
    at: Place = Device()

    def __post_init__(self):
        msgspec.structs.force_setattr(self, "save", selectors(self.save))
        _check_place(self.at)


def _check_place(place: object) -> None:
    if not isinstance(place, Place):
        raise InputError(f"a place is Device(), not {place!r}")


Policy = Save | Recompute

"""What happens to the values that a block leaves for its backward: two actions, places, selectors. Data only.

They are tagged msgspec structs rather than dataclasses so that a plan file is decoded strictly, with no code of ours.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Iterable

import msgspec

from reforward._errors import InputError

#: Families of operations, recognised at the level of `torch.nn.functional` and tensor methods.
FAMILIES = ("matmul", "attention", "conv", "norm", "elementwise", "random")


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a plan. msgspec checks types when it decodes; here they are checked as well where code makes one.

    Raises:
        InputError: a field has a value of another type.
    """

    def __post_init__(self):
        for field in _fields(type(self)):
            given = getattr(self, field.name)
            try:
                value = msgspec.convert(given, field.type)
            except msgspec.ValidationError:
                name, wanted = f"{type(self).__name__}: {field.name}", _type_in_words(field.type)
                raise InputError(f"{name} must be {wanted}, not {reprlib.repr(given)}") from None
            msgspec.structs.force_setattr(self, field.name, value)


@functools.cache
def _fields(kind: type[Data]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _type_in_words(kind: object) -> str:
    """`Save | Recompute` rather than its full name."""
    return kind.__name__ if type(kind) is type(Data) or type(kind) is type else re.sub(r"\b\w+\.", "", str(kind))


class Device(Data, frozen=True, kw_only=True, tag_field="is", tag="device"):
    """Saved values stay where they were made."""


Place = Device


class Ops(Data, frozen=True, kw_only=True, tag_field="is", tag="ops"):
    """Selects the outputs of one family of operations.

    Attributes:
        family: one of `FAMILIES`.
        within: pattern on the path of a submodule; only operations that run inside it are meant. None: anywhere in
            the block.
        nth: only this one, counted from 0 over the operations of the family that run in one call of the submodule (of
            the block, if `within` is None). None: all of them.
    """

    family: str
    within: str | None = None
    nth: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.family not in FAMILIES:
            raise InputError(f"there is no family of operations {self.family!r}; known are {', '.join(FAMILIES)}")
        if self.nth is not None and self.nth < 0:
            raise InputError(f"Ops: nth counts from 0 in the order of the calls; it can't be {self.nth}")


class Modules(Data, frozen=True, kw_only=True, tag_field="is", tag="modules"):
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
    if isinstance(given, (str, Ops, Modules)) or not isinstance(given, Iterable):
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


class Save(Data, frozen=True, kw_only=True, tag_field="is", tag="save"):
    """Everything that backward needs is kept, as without checkpointing.

    Attributes:
        at: where the values live until backward.
    """

    at: Place = Device()


class Recompute(Data, frozen=True, kw_only=True, tag_field="is", tag="recompute"):
    """Only the block's inputs are kept, and what `save` selects; the rest is computed again when backward needs it.

    Attributes:
        save: what is kept beside the inputs; text is accepted as in `selectors`.
        at: where the kept values live until backward.
    """

    save: tuple[Selector, ...] = ()
    at: Place = Device()

    def __post_init__(self):
        msgspec.structs.force_setattr(self, "save", selectors(self.save))
        super().__post_init__()

    @property
    def patterns(self) -> list[str]:
        """Those that `save` names submodules by."""
        named = [item.pattern if isinstance(item, Modules) else item.within for item in self.save]
        return [pattern for pattern in named if pattern is not None]


Policy = Save | Recompute

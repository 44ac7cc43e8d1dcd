"""Command-line arguments of the form key=value, read into a dataclass."""

import dataclasses
import sys
import types
import typing
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_NONE = ("none", "null")
_BOOLS = {"true": True, "false": False}


def parse_arguments(options: type[T], arguments: list[str], usage: str) -> T:
    """Fill a dataclass from key=value strings; a value may hold further equals signs.

    Fields are str, int, float or bool, each possibly `| None` (written none or null); a field's
    metadata["help"] is its line in --help. Without a default a field is required. A wrong argument
    ends the process with one line on stderr and status 2; --help prints `usage` and the fields.

    Args:
        options: the dataclass.
        arguments: sys.argv[1:], without words that the caller has read.
        usage: what --help prints first.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    values = {}
    for argument in arguments:
        if argument in ("-h", "--help", "help"):
            print(usage.strip() + "\n\n" + _describe(fields, hints))
            raise SystemExit(0)
        key, equals, text = argument.partition("=")
        if not equals:
            fail(f"arguments have the form key=value, got {argument!r}; see --help")
        if key not in fields:
            fail(f"there is no option {key}; the options are {', '.join(fields)}")
        if key in values:
            fail(f"{key} is given twice; keep one of them")
        values[key] = _convert(key, text, hints[key])
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            fail(f"{name}=... is required; see --help")
    return options(**values)


def fail(message: str) -> typing.NoReturn:
    """End the process: one line on stderr, status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def option(help: str, **default: Any) -> Any:
    """A dataclass field with its line of --help; `default=...` makes it optional."""
    return dataclasses.field(metadata={"help": help}, **default)


def _convert(key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if types.NoneType in kinds and text.lower() in _NONE:
        return None
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    if kind is bool and text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    try:
        if kind is not bool:
            return kind(text)
    except ValueError:
        pass
    fail(f"{key} must be {_name(hint)}, got {text!r}")


def _name(hint: Any) -> str:
    return str(hint) if isinstance(hint, types.UnionType) else hint.__name__


def _describe(fields: dict[str, dataclasses.Field], hints: dict[str, Any]) -> str:
    lines = []
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING
        default = "required" if required else f"default {str(field.default).lower() or 'empty'}"
        lines.append(f"  {name + '=' + _name(hints[name]):<32}{field.metadata['help']} ({default})")
    return "options:\n" + "\n".join(lines)

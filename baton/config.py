"""Settings of a service: flags over environment over a TOML file over defaults. Unknown keys stop the start.

A service describes its settings as one frozen `msgspec.Struct` whose fields are
`Annotated[T, msgspec.Meta(description=...)]`. The field `nats_url` of the service `gateway` is the flag
`--nats-url`, the variable `BATON_GATEWAY_NATS_URL` and the key `nats_url` in the file that `--config`
or `BATON_GATEWAY_CONFIG` names. An empty variable counts as not set. Kubernetes injects variables such
as `BATON_GATEWAY_PORT` for a Service of that name: set `enableServiceLinks: false` there.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from baton.errors import ConfigurationError

SettingsType = TypeVar("SettingsType", bound=msgspec.Struct)

_UNITS: Final = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes", "tokens": "tokens", "blocks": "blocks"}
_BOOLEANS: Final = {"true", "false", "1", "0"}


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: object
    """The annotation, with its constraints."""
    bare: object
    """The type without `Annotated` and `| None`."""
    description: str
    default: str
    required: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def unit(self) -> str:
        return next((_UNITS[part] for part in reversed(self.name.split("_")) if part in _UNITS), "")


def load(
    settings_type: type[SettingsType],
    *,
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> SettingsType:
    """Return the settings of `service`. Raises ConfigurationError, a sentence that names the key.

    `--help` prints every setting and leaves with status 0.
    """
    arguments = sys.argv[1:] if argv is None else argv
    environment = os.environ if environ is None else environ
    fields = {field.name: field for field in _fields(settings_type)}
    prefix = f"BATON_{service.upper().replace('-', '_')}_"
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(_help(service, prefix, fields.values()))
        raise SystemExit(0)

    flags = _read_flags(arguments, fields)
    variables = _read_environment(environment, prefix, fields)
    file = flags.pop("config", None) or variables.pop("config", None)
    values = _read_file(Path(file), fields) if file else {}
    values |= {name: _parse(text, fields[name], prefix + name.upper()) for name, text in variables.items()}
    values |= {name: _parse(text, fields[name], fields[name].flag) for name, text in flags.items()}
    missing = [field for field in fields.values() if field.required and field.name not in values]
    if missing:
        raise ConfigurationError(
            f"the setting {missing[0].name} is missing: give {missing[0].flag} or {prefix}{missing[0].name.upper()}",
            param=missing[0].name,
        )
    try:
        return settings_type(**values)
    except ValueError as error:
        raise ConfigurationError(f"the settings of the {service} do not fit together: {error}") from error


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fields(settings_type: type[msgspec.Struct]) -> list[_Field]:
    hints = get_type_hints(settings_type, include_extras=True)
    return [_describe(field, hints[field.name]) for field in msgspec.structs.fields(settings_type)]


def _describe(field: msgspec.structs.FieldInfo, annotation: object) -> _Field:
    assert field.name != "config", "`--config` is the file"
    metas = [extra for extra in get_args(annotation)[1:] if isinstance(extra, msgspec.Meta)]
    default: object = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return _Field(
        name=field.name,
        type=annotation,
        bare=_bare(annotation),
        description=next((meta.description for meta in metas if meta.description), ""),
        default="" if field.required else _show(default),
        required=field.required,
    )


def _bare(annotation: object) -> object:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _bare(members[0]) if len(members) == 1 else annotation
    return annotation


def _show(default: object) -> str:
    if default is None or default == "":
        return "none"
    if isinstance(default, Path):
        return str(default)
    encoded = msgspec.json.encode(default).decode()
    return encoded.strip('"')


# ---------------------------------------------------------------- reading


def _read_flags(arguments: Sequence[str], fields: Mapping[str, _Field]) -> dict[str, str]:
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_boolean = name in fields and fields[name].bare is bool
        if flag.startswith("--no-") and (negated := name.removeprefix("no_")) in fields and not has_value:
            if fields[negated].bare is not bool:
                raise ConfigurationError(f"{flag} makes no sense: {negated} is not true or false", param=negated)
            name, value, has_value = negated, "false", "="
        elif not flag.startswith("--") or not (name in fields or name == "config"):
            raise _unknown(flag, ["--config", *(field.flag for field in fields.values())])
        elif is_boolean and not has_value:
            value, has_value = (rest.pop(0) if rest and rest[0] in _BOOLEANS else "true"), "="
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigurationError(f"{flag} needs a value", param=name)
            value = rest.pop(0)
        found[name] = value
    return found


def _read_environment(environ: Mapping[str, str], prefix: str, fields: Mapping[str, _Field]) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        if name != "config" and (name not in fields or variable != prefix + name.upper()):
            raise _unknown(variable, [prefix + known.upper() for known in ("config", *fields)])
        if text:
            found[name] = text
    return found


def _read_file(path: Path, fields: Mapping[str, _Field]) -> dict[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"the settings file {path} is not TOML: {error}") from error
    for key in content:
        if key not in fields:
            raise _unknown(f"{key} in {path}", list(fields), key)
    return {key: _convert(value, fields[key], f"{key} in {path}", strict=True) for key, value in content.items()}


def _unknown(shown: str, known: list[str], key: str = "") -> ConfigurationError:
    near = difflib.get_close_matches(key or shown, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "--help lists all settings"
    return ConfigurationError(f"the setting {shown} is unknown; {hint}", param=key or shown)


# ---------------------------------------------------------------- values


def _parse(text: str, field: _Field, source: str) -> object:
    """Turn text into the field's type. Containers take JSON; tuples also take a comma-separated list."""
    origin = get_origin(field.bare) or field.bare
    is_sequence = origin in (tuple, list)
    if is_sequence and not text.lstrip().startswith("["):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if text and not parts:
            # Not the same as an empty text: a key that a secret's file lacks must not open a gateway to all.
            raise ConfigurationError(
                f"{source} has only spaces and commas: leave it empty, or name something", param=field.name
            )
        return _convert(parts, field, source, strict=False)
    if is_sequence or origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, msgspec.Struct)):
        try:
            return _convert(msgspec.json.decode(text), field, source, strict=True)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{source} is not JSON: {error}", param=field.name) from error
    return _convert(text, field, source, strict=False)


def _convert(value: object, field: _Field, source: str, *, strict: bool) -> object:
    try:
        converted: object = msgspec.convert(value, field.type, strict=strict, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        choices = ", ".join(_choices(field.bare))
        hint = f"; choose one of {choices}" if choices else ""
        raise ConfigurationError(f"{source} is malformed: {error}{hint}", param=field.name) from error
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigurationError(f"{source} is malformed: it must be a finite number", param=field.name)
    return converted


def _decode_path(kind: type, value: object) -> object:
    if kind is object:
        return value
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value)
    raise msgspec.ValidationError(f"Expected `{kind.__name__}`")


# ---------------------------------------------------------------- help


def _help(service: str, prefix: str, fields: Iterable[_Field]) -> str:
    width = max(60, min(110, shutil.get_terminal_size().columns))

    def entry(flag: str, text: str) -> str:
        wrapped = textwrap.fill(text, width, initial_indent="      ", subsequent_indent="      ")
        return f"  {flag}\n{wrapped}\n"

    parts = [
        f"usage: python -m baton_{service} [--setting VALUE ...]\n\n"
        f"Each setting can also be a variable, as in {prefix}CONFIG, or a key of a TOML file.\n\n",
        entry("--config FILE", f"TOML file with settings ({prefix}CONFIG)."),
    ]
    for field in fields:
        facts = ", ".join(
            fact for fact in (field.unit, "required" if field.required else f"default: {field.default}") if fact
        )
        shown = f"--[no-]{field.flag[2:]}" if field.bare is bool else f"{field.flag} {_kind(field.bare)}"
        parts.append(entry(shown, f"{field.description} ({facts})".strip()))
    return "".join(parts)


def _kind(bare: object) -> str:
    origin = get_origin(bare) or bare
    if origin in (dict, Mapping):
        return "JSON"
    if origin in (tuple, list):
        return "A,B,..."
    if choices := _choices(bare):
        return "|".join(choices)
    name = origin.__name__ if isinstance(origin, type) else ""
    return {"str": "TEXT", "int": "N", "float": "X", "Path": "PATH"}.get(name, "VALUE")


def _choices(bare: object) -> list[str]:
    """Return the possible values of an enum or a `Literal`; none of other types."""
    if isinstance(bare, type) and issubclass(bare, Enum):
        return [str(member.value) for member in bare]
    return [str(choice) for choice in get_args(bare)] if get_origin(bare) is Literal else []

"""Reading the YAML file: plain values out, with the line of each, and every fault of the file as a sentence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ..errors import ConfigError
from ..module_path import nearest
from .syntax import explain_syntax

Location = tuple[str | int, ...]

_START = "Write 'key: value' lines, e.g. 'sharding_size: auto'."
_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Origin:
    """Where settings were written.

    Attributes:
        name: The file as the caller named it; ``None`` for a mapping.
        lines: Line (from 1) of each key and list entry, by location such as ``("sub_modules_to_wrap", 3)``.
    """

    name: str | None = None
    lines: Mapping[Location, int] = field(default_factory=dict)

    def line(self, location: Location) -> int | None:
        """Return the line of ``location``, or of the nearest thing around it; ``None`` where no line is known."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location)

    def where(self, location: Location, line: int | None = None) -> str:
        """Return ``cfg.yaml:12: sub_modules_to_wrap[3]``, leaving out the parts that are not known."""
        line = line or self.line(location)
        place = [] if self.name is None else [self.name if line is None else f"{self.name}:{line}"]
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{_one_line(part)}" for part in location)[1:]
        return ": ".join([*place, key] if key else place)


def _one_line(key: str) -> str:
    return key if key.isprintable() else repr(key)


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        location: Which key or entry.
        text: What is wrong, and what to write instead.
        line: Set where it is not the line of ``location``.
    """

    location: Location
    text: str
    line: int | None = None


def report(problems: Collection[Problem], origin: Origin) -> ConfigError:
    """Return one error that lists all ``problems``, a line each, in the order of the file."""
    ordered = sorted(problems, key=lambda problem: problem.line or origin.line(problem.location) or 0)
    lines = (
        ": ".join(filter(None, [origin.where(problem.location, problem.line), problem.text])) for problem in ordered
    )
    return ConfigError("\n".join(dict.fromkeys(lines)))


def read_yaml(path: str) -> tuple[dict[str, object], Origin, list[Problem]]:
    """Return the settings in a file, their lines, and what can be said against the YAML itself.

    Raises:
        ConfigError: There is no text in ``path`` that reads as one YAML mapping.
    """
    text = read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        reader = _NodeReader(loader)
        data = reader.mapping(_only_mapping(path, loader), ())
    except yaml.reader.ReaderError as error:
        line, code = text.count("\n", 0, error.position) + 1, ord(text[error.position])
        raise ConfigError(f"{path}:{line}: the character U+{code:04X} does not belong in text. Remove it.") from None
    except yaml.MarkedYAMLError as error:
        line, message = explain_syntax(error, text)
        raise ConfigError(f"{path}:{line}: {message}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists are nested too deeply. Write module paths at most two lists deep.") from None
    return data, Origin(path, reader.lines), reader.problems


def _only_mapping(path: str, loader: yaml.SafeLoader) -> yaml.MappingNode:
    node = loader.get_node() if loader.check_node() else None
    if node is None:
        raise ConfigError(f"{path}: the file is empty. {_START}")
    if loader.check_node():
        second = loader.get_node()
        line = second.start_mark.line + 1 if second else 1
        raise ConfigError(f"{path}:{line}: a second YAML document starts here. Keep one document in the file.")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(_not_a_mapping(path, node))
    return node


def write_yaml(settings: Mapping[str, object], comments: Mapping[str, str]) -> str:
    """Return ``settings`` as YAML text, with ``comments`` behind the keys they are for."""
    text = ""
    for key, value in settings.items():
        dumped = yaml.dump({key: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
        first, _, rest = dumped.partition("\n")
        text += f"{first}{f'  # {comments[key]}' if key in comments else ''}\n{rest}"
    return text


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def read_text(path: str) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    if not path:
        raise ConfigError("the path of the YAML file is empty. Write the name of a file.")
    if "\n" in path:
        raise ConfigError("the path of the YAML file is text of several lines. Pass a path, or a mapping of settings.")
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file. {_suggest_file(Path(path))}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory. Name a YAML file{_example_in(Path(path))}.") from None
    except PermissionError:
        raise ConfigError(f"{path}: the file may not be read. Give this user the right to read it.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path!r}: the file cannot be read ({reason}). Name a readable YAML file.") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: the byte 0x{raw[error.start]:02x} is not UTF-8. Save the file as UTF-8."
        ) from None


def _suggest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no folder {str(path.parent)!r} either. Write the path of an existing YAML file."
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    close = nearest(path.name, names)
    if not close:
        return "Write the path of an existing YAML file."
    return f"Write {' or '.join(str(path.parent / name) for name in close)}."


def _example_in(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    return f", e.g. {folder / names[0]}" if names else ""


def _not_a_mapping(path: str, node: yaml.Node) -> str:
    where = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return f"{where}: the file holds a list. {_START}"
    first = str(node.value).split(maxsplit=1)[:1]
    key, colon, value = first[0].partition(":") if first else ("", "", "")
    if key and colon and value:
        return f"{where}: {first[0]} lacks the space after the colon. Write '{key}: {value}'."
    return f"{where}: the file holds only the text {node.value!r}. {_START}"


class _NodeReader:
    """Turns YAML nodes into values and notes the line of each."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []
        self._loader = loader
        self._open: list[yaml.Node] = []

    def mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, object]:
        values: dict[str, object] = {}
        key_lines: dict[str, list[int]] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value)
            at = (*location, key)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(location, "a key is not a word. Write 'key: value' lines.", line))
            elif key_node.tag == "tag:yaml.org,2002:merge":
                self.problems.append(Problem(at, "merged mappings are not read here. Write the keys out.", line))
            else:
                key_lines.setdefault(key, []).append(line)
                self.lines[at] = line
                values[key] = self._value(value_node, at)
        for key, lines in key_lines.items():
            if len(lines) > 1:
                text = f"is given more than once, in lines {', '.join(map(str, lines))}. Keep one of them."
                self.problems += [Problem((*location, key), text, line) for line in lines]
        return values

    def _value(self, node: yaml.Node, location: Location) -> object:
        if any(node is outer for outer in self._open):
            self.problems.append(Problem(location, "contains itself through an alias. Write the values out."))
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, location)
            if isinstance(node, yaml.SequenceNode):
                return [self._entry(entry, (*location, index)) for index, entry in enumerate(node.value)]
            return self._scalar(node, location)
        finally:
            self._open.pop()

    def _entry(self, node: yaml.Node, location: Location) -> object:
        self.lines[location] = node.start_mark.line + 1
        return self._value(node, location)

    def _scalar(self, node: yaml.Node, location: Location) -> object:
        try:
            value: object = self._loader.construct_object(node)
        except (yaml.MarkedYAMLError, ValueError, KeyError):
            self.problems.append(
                Problem(location, f"the value {node.value!r} cannot be read. Quote it, and write no tag.")
            )
            return node.value
        if type(value) is int and not _PLAIN_INT.fullmatch(node.value):
            self.problems.append(Problem(location, f"YAML reads {node.value} as the number {value}. Write {value}."))
        return value

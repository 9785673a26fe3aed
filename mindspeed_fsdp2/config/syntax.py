"""What a YAML syntax error means to the author of the file."""

from __future__ import annotations

import re

import yaml

_GROUPED_PATH = re.compile(r"[\w.]*\{[\d*,\s-]*\}[\w.{}*-]*")
_MISSING_SPACE = re.compile(r"\s*(\w+):([^\s:][^:]*)")
_RULES = (
    (
        "mapping values are not allowed",
        "a colon does not fit here. Write one 'key: value' a line, keys indented alike.",
    ),
    ("could not find expected ':'", "this line is neither a key nor a list entry. Write 'key: value' or '- entry'."),
    (
        "sequence entries are not allowed",
        "a list entry starts in the middle of a line. Write '- entry' on its own line.",
    ),
    ("but found ']'", "the ']' closes nothing. Remove it or open the list with '['."),
    ("but found '}'", "the '}' closes nothing. Quote module paths: \"layers.{*}\"."),
    (
        "expected <block end>",
        "the indentation does not fit the lines above. Indent keys alike, and entries of a list alike.",
    ),
    ("expected '<document start>'", "a second YAML document starts here. Keep one document in the file."),
    ("unknown escape", "a backslash in double quotes starts an escape. Write single quotes."),
    ("chomping", "a value that starts with '|' or '>' is a block of text. Quote it."),
    ("expected alphabetic", "a value that starts with '&' is an anchor. Quote it."),
    ("duplicate anchor", "the anchor is defined twice. Give each anchor a name of its own."),
)


def explain_syntax(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    """Return the line (from 1) at fault and a sentence that says what to write there.

    Args:
        error: Raised by the parser on ``text``.
        text: The whole file.
    """
    problem, context = error.problem or "", error.context or ""
    end = error.problem_mark.line if error.problem_mark else 0
    start = error.context_mark.line if error.context_mark else end
    lines = [*text.split("\n"), ""]
    if "'\\t'" in problem:
        return end + 1, "a tab stands where YAML wants spaces. Indent with spaces."
    flow = context.startswith(("while parsing a flow", "while scanning an alias"))
    path = flow and _GROUPED_PATH.search("\n".join(lines[start : end + 1]))
    if path:
        line = start + 1 + "\n".join(lines[start : end + 1]).count("\n", 0, path.start())
        return line, f'the module path {path[0]} stands without quotes. Quote module paths: "{path[0]}".'
    if "alias" in problem or "alias" in context:
        return end + 1, "a value that starts with '*' is an alias. Quote it, or write \"{*}\" for every child."
    if context.startswith("while parsing a flow"):
        return start + 1, 'the list or mapping that starts here is not closed, or lacks a comma. Write ["a", "b"].'
    if "quoted scalar" in context and "end of stream" in problem:
        return start + 1, "the quotation mark opened here is never closed. Close it."
    if "cannot start any token" in problem:
        column = error.problem_mark.column if error.problem_mark else 0
        return end + 1, f"a value cannot start with {lines[end][column : column + 1]!r}. Quote it."
    missing = _MISSING_SPACE.fullmatch(lines[end - 1].rstrip()) if end else None
    if missing and "mapping values" in problem:
        return end, f"{missing[0].strip()} lacks the space after the colon. Write '{missing[1]}: {missing[2]}'."
    for sign, message in _RULES:
        if sign in problem:
            return (start if sign.startswith("could not find") else end) + 1, message
    return end + 1, f"this is not valid YAML ({problem}). Write 'key: value' lines and '- entry' lists."

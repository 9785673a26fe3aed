"""Parts of Markdown pages that a script writes, between two comments."""

from __future__ import annotations


def between_markers(text: str, name: str, new: str, script: str) -> str:
    """Return ``text`` with ``new`` in place of what stands between the two markers called ``name``.

    Args:
        text: The whole page.
        name: What the markers are called.
        new: The part, ending in a newline.
        script: The script that writes it, for whoever edits the page.

    Raises:
        ValueError: The markers are not there, once each and in order.
    """
    begin, end = f"<!-- {name}: begin, written by {script} -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, also, after = rest.partition(end)
    if not found or not also or begin in rest or end in before or end in after:
        raise ValueError(f"the markers are missing or doubled. Write the lines {begin} and {end} once.")
    # The empty lines let Markdown see the table behind an HTML comment.
    return f"{before}{begin}\n\n{new}\n{end}{after}"

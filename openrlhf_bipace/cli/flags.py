"""``python -m openrlhf_bipace.cli.flags > docs/flags.md``: the page with every flag, from `config.py`."""

from __future__ import annotations

from dataclasses import fields

from openrlhf_bipace.config import SECTIONS

HEAD = """# Flags

Every flag this project adds to OpenRLHF's, written by `python -m openrlhf_bipace.cli.flags` from `config.py`;
`bipace-train --help` prints the same.
"""


def page() -> str:
    """The whole page, a table for each section."""
    parts = [HEAD]
    for section, cls in SECTIONS.items():
        parts.append(f"\n## `--{section}.*`\n\n| flag | default | allowed | meaning |\n|---|---|---|---|\n")
        for field in fields(cls):
            allowed = ", ".join(f"`{choice}`" for choice in field.metadata["choices"] or [])
            words = field.metadata["help"].replace("|", "\\|")
            parts.append(f"| `--{section}.{field.name}` | `{field.default!r}` | {allowed} | {words} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")

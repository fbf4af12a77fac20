"""The page with every flag says what the code says."""

from pathlib import Path

from openrlhf_bipace.cli.flags import page


def test_the_page_is_up_to_date():
    shipped = (Path(__file__).parent.parent / "docs" / "flags.md").read_text(encoding="utf-8")
    assert shipped == page(), "python -m openrlhf_bipace.cli.flags > docs/flags.md"

"""How the studies' figures look and are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: dict[str, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#E6E6E6", "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


def save(folder: Path, paints: Mapping[str, Callable[[Figure], None]]) -> list[str]:
    """Paint every file of `paints` (name -> painter) into `folder`: the same bytes everywhere. The names."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        for name, paint in paints.items():
            figure = Figure(dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            paint(figure)
            figure.savefig(folder / name, metadata={"Software": None})  # no version
    return list(paints)

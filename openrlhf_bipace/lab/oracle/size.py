"""How large a study is. Apart from the rest, so that ``bipace-study --help`` loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    tasks: int = 8
    model_tasks: int = 4
    resamples: int = 200
    groups: tuple[int, ...] = (4, 8, 16, 32)
    wordings: tuple[int, ...] = (1, 2, 8)  # w wordings of three sentences are w^3 texts per state
    base_wordings: int = 2
    grid: tuple[float, ...] = (0.005, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.3)  # of epsilon
    steps: int = 400  # of training the tiny models
    episodes: int = 1200  # demonstrated to them


QUICK = Size(2, 1, 6, (2, 4), (1, 2), 1, (0.01, 0.1), 8, 40)

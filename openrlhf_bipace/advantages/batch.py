"""What estimators read and what they return."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from openrlhf_bipace.advantages.segments import Parts, dense, owner, pair, sizes

Array = Any  # a sequence, a numpy array or a tensor; a tensor once the batch is checked

LARGEST = 1e30  # of a return or score: its square and its float32 value are still finite, and no real reward is near


class Branch(enum.IntEnum):
    """How a step's advantage was made."""

    NONE = 0  # no action comparison (state baselines, episode-only estimators)
    PACE = 1  # judged against peers by action
    FALLBACK = 2  # no peer that allows it: leave-one-out, or what --bipace.fallback says
    SINGLETON = 3  # alone in its part: 0, or compared with its group (`hierarchy.py`)


@dataclass(slots=True)
class StepBatch:
    """N turns of one iteration as arrays; row order does not matter. A trajectory is the pair (group, trajectory).

    Keys may be lists of str or int arrays; they become int64 codes. Example: two rollouts of one task, two turns
    each::

        StepBatch(group=["a"] * 4, trajectory=[0, 0, 1, 1], turn=[0, 1, 0, 1], ret=[0.95, 1, 0, 0], score=[1, 1, 0, 0],
                  action_key=["go", "take", "go", "look"], observation_key=["hall", "room", "hall", "room"])

    Raises:
        ValueError: a length, a type or a number that is not finite (or beyond 1e30), naming the field; two rows of one
            (group, trajectory, turn).
    """

    group: Array  # [N] prompt group -> int64 codes
    trajectory: Array  # [N] int, unique within a group; orders the clustering
    turn: Array  # [N] int, in time order within a trajectory
    ret: Array  # [N] discounted return, invalid penalty included
    score: Array  # [N] the trajectory's episode return, minus this turn's penalty
    action_key: Array  # [N] equal keys are the same action
    observation_key: Array  # [N] what GiGPO hashes: the raw observation
    cluster: Array | None = None  # [N] int labels of `clustering.cluster`
    observation_text: Sequence[str] | None = None  # [N] for the ngram partition
    state_key: Array | None = None  # [N] true state; None or -1: unknown
    valid: Array | None = None  # [N] the response parsed into an action
    source_trajectory: Array | None = None  # [N] index in `from_trajectories`' list
    source_step: Array | None = None  # [N] index in that trajectory's `steps`
    trajectories_failed: int = 0  # left out: the environment failed
    trajectories_empty: int = 0  # left out: not one token was generated
    group_names: list[str] = field(init=False)  # [groups] of the codes in `group`
    action_names: list[str] = field(init=False)  # of the codes in `action_key`
    row: torch.Tensor = field(init=False)  # [N] int64, code of (group, trajectory)
    trajectories: int = field(init=False)  # number of distinct (group, trajectory)
    group_size: torch.Tensor = field(init=False)  # [groups] float64, trajectories of each group
    share: torch.Tensor = field(init=False)  # [N] float64, 1 / turns of the row's trajectory
    previous: torch.Tensor = field(init=False)  # [N] int64, row of the turn before in the trajectory; -1: none

    def __post_init__(self) -> None:
        n = len(self.group)
        self.group, names = _codes("group", self.group, n)
        self.group_names = [str(name) for name in names]
        self.trajectory = _ints("trajectory", self.trajectory, n)
        self.turn = _ints("turn", self.turn, n)
        self.ret = _floats("ret", self.ret, n)
        self.score = _floats("score", self.score, n)
        self.action_key, names = _codes("action_key", self.action_key, n)
        self.action_names = [str(name) for name in names]
        self.observation_key, _ = _codes("observation_key", self.observation_key, n)
        for name in ("cluster", "source_trajectory", "source_step"):
            if getattr(self, name) is not None:
                setattr(self, name, _ints(name, getattr(self, name), n, low=0))
        if self.cluster is not None:
            self.cluster, _ = dense(self.cluster)
        if self.observation_text is not None:
            _length("observation_text", self.observation_text, n)
        if self.state_key is not None:
            self.state_key = _states(self.state_key, n)
        if self.valid is not None:
            self.valid = _floats("valid", self.valid, n).bool()
        self.row, self.trajectories = pair(self.group, _codes("trajectory", self.trajectory, n)[0])
        self.group_size = sizes(owner(self.group, self.row, self.trajectories), self.groups)
        self.share = (1.0 / sizes(self.row, self.trajectories))[self.row]
        self.previous = self._link_turns()

    def __len__(self) -> int:
        return len(self.ret)

    @property
    def groups(self) -> int:
        """Number of prompt groups."""
        return len(self.group_names)

    def within(self, scope: str) -> tuple[torch.Tensor, int]:
        """([N] codes, their number) of what a part may not cross: the prompt group; nothing with `scope` "batch"."""
        if scope == "batch":
            return torch.zeros_like(self.group), min(len(self), 1)
        return self.group, self.groups

    def describe(self, row: int) -> str:
        """A row in words, for messages: ``group g, trajectory 3, turn 5``."""
        name = self.group_names[int(self.group[row])]
        return f"group {name}, trajectory {int(self.trajectory[row])}, turn {int(self.turn[row])}"

    def order(self, by: str) -> torch.Tensor:
        """[N] permutation in which steps are clustered (spec section 6): `by` "turn" or "trajectory" first."""
        keys = {"turn": (self.trajectory, self.turn), "trajectory": (self.turn, self.trajectory)}
        if by not in keys:
            raise ValueError(f"order: got {by!r}, allowed: {' | '.join(keys)}")
        return _lexsort(*keys[by], self.group)

    def _link_turns(self) -> torch.Tensor:
        by_time = _lexsort(self.turn, self.row)
        row, turn = self.row[by_time], self.turn[by_time]
        same = row[1:] == row[:-1]
        twice = torch.nonzero(same & (turn[1:] == turn[:-1]))
        if len(twice):
            raise ValueError(f"two rows are {self.describe(int(by_time[twice[0]]))}; a trajectory has each turn once")
        previous = torch.full((len(self),), -1)
        previous[by_time[1:]] = torch.where(same, by_time[:-1], -1)
        return previous


@dataclass(slots=True)
class StepPart:
    """What an estimator says about the steps, before it joins the episode part."""

    value: torch.Tensor  # [N] float64, A_step
    branch: torch.Tensor  # [N] int8 of Branch
    parts: Parts  # the partition, for the diagnostics


@dataclass(slots=True)
class StepAdvantages:
    """One value per step. `total` = `episode` + w * `step` is what every response token of the step gets."""

    episode: torch.Tensor  # [N] float64
    step: torch.Tensor  # [N] float64
    total: torch.Tensor  # [N] float64
    branch: torch.Tensor  # [N] int8 of Branch
    diagnostics: dict[str, float]  # flat names "bipace/..."


def _lexsort(*keys: torch.Tensor) -> torch.Tensor:
    """Stable permutation that sorts by the last key first, then by the one before, as numpy.lexsort."""
    return torch.from_numpy(np.lexsort([key.numpy() for key in keys]))


def _length(name: str, values: Any, n: int) -> None:
    shape = tuple(values.shape) if hasattr(values, "shape") else (len(values),)
    if shape != (n,):
        raise ValueError(f"{name}: got shape {shape}, expected ({n},), one per row of `group`")


def _tensor(name: str, values: Any, **options: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(values, **options).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: got a {type(values).__name__} that is no array of numbers ({error})") from None


def _ints(name: str, values: Any, n: int, low: int | None = None) -> torch.Tensor:
    _length(name, values, n)
    array = _tensor(name, values) if n else torch.zeros(0, dtype=torch.int64)
    if array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
        raise ValueError(f"{name}: got {array.dtype}, expected integers")
    array = array.to(torch.int64)
    if low is not None and n and int(array.min()) < low:
        raise ValueError(f"{name}: got {int(array.min())}, expected integers >= {low}")
    return array


def _floats(name: str, values: Any, n: int) -> torch.Tensor:
    _length(name, values, n)
    array = _tensor(name, values, dtype=torch.float64)  # with the dtype at once, or lists would become float32
    bad = torch.nonzero(~(array.abs() <= LARGEST))  # NaN too
    if len(bad):
        got = float(array[bad[0]])
        raise ValueError(f"{name}: got {got} at row {int(bad[0])}, expected finite numbers within +-{LARGEST:g}")
    return array


def _codes(name: str, values: Any, n: int) -> tuple[torch.Tensor, list]:
    """Equal keys to equal int64 codes 0 .. K-1. Returns ([N] codes, the K keys)."""
    _length(name, values, n)
    if n and not isinstance(values, torch.Tensor) and isinstance(values[0], str):
        code = {key: i for i, key in enumerate(dict.fromkeys(values))}
        if not all(isinstance(key, str) for key in code):
            raise ValueError(f"{name}: got keys of several types, expected all str or all int")
        return torch.from_numpy(np.fromiter(map(code.__getitem__, values), np.int64, n)), list(code)
    keys, codes = torch.unique(_ints(name, values, n), return_inverse=True)
    return codes, keys.tolist()


def _states(values: Any, n: int) -> torch.Tensor:
    """[N] int64 codes of the true states, -1 where unknown."""
    _length("state_key", values, n)
    if isinstance(values, (np.ndarray, torch.Tensor)):
        values = _ints("state_key", values, n, low=-1).tolist()  # ids may be hashes: renumber them
        values = [None if value < 0 else value for value in values]
    code = {key: i for i, key in enumerate(dict.fromkeys(value for value in values if value is not None))}
    return torch.tensor([-1 if value is None else code[value] for value in values], dtype=torch.int64)

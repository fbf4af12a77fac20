"""Hidden states of collected turns, at several layers and positions; prefixes in common are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.rows import hidden_positions, training_rows

NODES = 1024  # distinct prefixes per forward: attention grows with the square
Phi = dict[tuple[int, str], torch.Tensor]  # (layer, position) -> [N, d] float32


@torch.no_grad()
def hidden_states(
    model: Any, trajectories: Sequence[Trajectory], layers: Sequence[int], positions: Sequence[str]
) -> Phi:
    """What training would compare: ``hidden_states[layer]`` of every turn that counts, trajectory after trajectory.

    Args:
        layers: negative numbers as in --bipace.layer.
        positions: as in --bipace.position.

    Rows are cut after the last token that is read. Raises ValueError for a layer that the model lacks.
    """
    check_layers(model, layers)
    wanted = []  # per training row: its tokens, and per position the indices to read
    for owner, row in zip(*training_rows(trajectories), strict=True):
        where = {position: hidden_positions(row, trajectories[owner], position) for position in positions}
        wanted.append((tuple(row.tokens[: max(map(max, where.values())) + 1]), where))
    readings: dict[tuple[int, ...], set[int]] = {}
    for tokens, where in wanted:
        readings.setdefault(tokens, set()).update(*where.values())
    states = _read(model, readings, layers)
    return {
        (layer, position): torch.stack([states[tokens][i][k] for tokens, where in wanted for i in where[position]])
        for k, layer in enumerate(layers)
        for position in positions
    }


def check_layers(model: Any, layers: Sequence[int]) -> None:
    """ValueError for a layer that the model lacks, or -1, whose value is read after the final norm."""
    depth = model.config.num_hidden_layers
    for layer in layers:
        if not -depth <= layer <= -2:
            raise ValueError(f"--layers: got {layer}, allowed: {-depth} to -2 (the model has {depth} layers)")


def _read(
    model: Any, readings: dict[tuple[int, ...], set[int]], layers: Sequence[int]
) -> dict[tuple[int, ...], dict[int, torch.Tensor]]:
    """Per sequence and index to read: [layers, d]."""
    out = {}
    with tqdm(total=len(readings), desc="   hidden states", unit="row") as bar:
        for batch in _batches(sorted(readings)):
            tree = Tree.of(batch)
            states = _forward(model, tree, layers)
            for tokens, path in zip(batch, tree.paths, strict=True):
                out[tokens] = {index: states[path[index]].clone() for index in readings[tokens]}
            bar.update(len(batch))
    return out


@dataclass(slots=True)
class Tree:
    """Sequences as one, in which a token attends to its own prefix: what they share is there once.

    Example: [5, 6, 7] and [5, 6, 8] are ids 5 6 7 8, depths 0 1 2 2, paths [0, 1, 2] and [0, 1, 3].
    """

    ids: list[int]  # [T]
    depth: list[int]  # [T] position in its sequence
    paths: list[list[int]]  # of each sequence, the places of its tokens
    sees: torch.Tensor  # [T, T] bool, whether a token attends to another

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> Tree:
        """The tree of sorted sequences."""
        ids: list[int] = []
        depth: list[int] = []
        paths: list[list[int]] = []
        for before, row in zip([(), *rows], rows, strict=False):
            shared, first = _shared(before, row), len(ids)
            ids += row[shared:]
            depth += range(shared, len(row))
            paths.append([*(paths[-1][:shared] if paths else []), *range(first, len(ids))])
        sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
        for path in paths:
            for place in path:
                sees[place, path[: depth[place] + 1]] = True
        return cls(ids, depth, paths, sees)


def _forward(model: Any, tree: Tree, layers: Sequence[int]) -> torch.Tensor:
    """[T, layers, d] float32 on the CPU."""
    hide = torch.zeros(tree.sees.shape, dtype=model.dtype).masked_fill_(~tree.sees, torch.finfo(model.dtype).min)
    found = model.base_model(
        torch.tensor([tree.ids], device=model.device),
        position_ids=torch.tensor([tree.depth], device=model.device),
        attention_mask=hide[None, None].to(model.device),
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    return torch.stack([found[layer][0].float().cpu() for layer in layers], dim=1)


def _batches(rows: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Consecutive sorted `rows`, as many at a time as make a tree of `NODES` tokens."""
    out: list[list[tuple[int, ...]]] = []
    size = 0
    for before, row in zip([(), *rows], rows, strict=False):
        size += len(row) - _shared(before, row)
        if not out or size > NODES:
            out.append([])
            size = len(row)
        out[-1].append(row)
    return out


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

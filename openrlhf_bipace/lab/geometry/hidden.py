"""Hidden states of collected turns, at several layers and positions; what prompts have in common is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.rows import hidden_positions, rows_of

TOKENS = 8192  # per batch, padding and common prefix included
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
    for trajectory in trajectories:
        for row in rows_of(trajectory) if trajectory.counts else []:
            where = {position: hidden_positions(row, trajectory, position) for position in positions}
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
            states = _forward(model, batch, layers)
            for i, tokens in enumerate(batch):
                out[tokens] = {index: states[i, index].float().cpu().clone() for index in readings[tokens]}
            bar.update(len(batch))
    return out


def _forward(model: Any, batch: Sequence[tuple[int, ...]], layers: Sequence[int]) -> torch.Tensor:
    """[B, T, layers, d] of sorted sequences: their common prefix once, then the rest of each."""
    shared = 0
    limit = min(map(len, batch)) - 1  # something must be left
    while shared < limit and batch[0][shared] == batch[-1][shared]:  # sorted: all between agree too
        shared += 1
    head, cache = None, None
    if shared and len(batch) > 1:
        found = model.base_model(_ids(model, [batch[0][:shared]]), use_cache=True, output_hidden_states=True)
        head, cache = torch.stack([found.hidden_states[layer] for layer in layers], dim=2), found.past_key_values
        cache.batch_repeat_interleave(len(batch))
    rest = [tokens[shared:] for tokens in batch] if cache else batch
    found = model.base_model(
        _ids(model, rest), past_key_values=cache, use_cache=cache is not None, output_hidden_states=True
    )
    tail = torch.stack([found.hidden_states[layer] for layer in layers], dim=2)
    return tail if head is None else torch.cat([head.expand(len(batch), -1, -1, -1), tail], dim=1)


def _ids(model: Any, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """[B, T] `rows`, padded on the right: causal attention needs no mask."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, tokens in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens)
    return ids.to(model.device)


def _batches(rows: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Consecutive `rows`, as many at a time as `TOKENS` allows."""
    out: list[list[tuple[int, ...]]] = []
    width = 0
    for row in rows:
        width = max(width, len(row))
        if not out or (len(out[-1]) + 1) * width > TOKENS:
            out.append([])
            width = len(row)
        out[-1].append(row)
    return out

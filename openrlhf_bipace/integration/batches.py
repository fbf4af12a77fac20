"""Training rows as OpenRLHF's `Experience`: one item per row, advantages on it, micro-batches by a plan, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages.pipeline import Credit
from openrlhf_bipace.integration.planned import PLAN, Place
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.plan import PADDING, MicroBatch, micro_batches
from openrlhf_bipace.rollout.rows import Row, locate


def row_item(trajectory: Trajectory, row: Row) -> Experience:
    """One training row as upstream stores a single sample: tensors without a batch dimension.

    Column t of the mask and of `rollout_log_probs` belongs to token t + 1. Reward, score and truncation are the whole
    trajectory's.
    """
    sequences = torch.tensor(row.tokens)
    mask = torch.zeros(len(sequences), dtype=torch.long)
    for start, end in row.spans:
        mask[start:end] = 1
    responses = [trajectory.steps[i] for i in row.steps]
    cut = trajectory.end.truncated or any(step.finish_reason == "length" for step in responses)
    return Experience(
        sequences=sequences,
        attention_mask=torch.ones_like(sequences),
        action_mask=mask[1:],
        rollout_log_probs=None if row.logprobs is None else torch.tensor(row.logprobs[1:]),
        rewards=torch.tensor(trajectory.reward),
        scores=torch.tensor(float(trajectory.success)),
        response_length=mask.sum(),
        truncated=torch.tensor(cut),
        total_length=torch.tensor(float(len(sequences))),
        prompts=[""],
        labels=[""],
        images=[None],
        mm_train_inputs=[None],
        info={"reward": torch.tensor(trajectory.reward), "score": torch.tensor(float(trajectory.success))},
    )


def padding_like(item: Experience) -> Experience:
    """A row of two tokens with the fields of `item`, masked from end to end: no loss, no gradient, no count."""
    kwargs = {}
    for field in fields(Experience):
        value = getattr(item, field.name)
        if isinstance(value, torch.Tensor):
            length = 2 if field.name in ("sequences", "attention_mask") else 1
            value = torch.zeros_like(value[:length] if value.dim() else value)
        elif isinstance(value, dict):
            value = {name: torch.zeros_like(entry) for name, entry in value.items()}
        kwargs[field.name] = value
    kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
    return Experience(**kwargs)


def join(items: Sequence[Experience], plan: Sequence[Sequence[MicroBatch]]) -> list[Experience]:
    """Micro-batches of `items` as `plan` distributes them, rank after rank."""
    padding = padding_like(items[0])
    return [
        make_experience_batch([padding if row == PADDING else items[row] for row in batch])
        for batch in chain.from_iterable(plan)
    ]


def part(batches: Sequence[Experience], plan: Sequence[Sequence[MicroBatch]], count: int) -> list[Experience]:
    """The inverse of `join`: `count` items in row order, padding removed."""
    items: list[Experience | None] = [None] * count
    for batch, rows in zip(batches, chain.from_iterable(plan), strict=True):
        for row, item in zip(rows, remove_padding_in_sequences(split_experience_batch(batch)), strict=True):
            if row != PADDING:
                items[row] = item
    return items


def place_on_ranks(
    items: Sequence[Experience],
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    ranks: int,
    limit: dict[str, int],
) -> list[list[Experience]]:
    """The micro-batches of each rank, as many for every rank, with their `Place` in ``info[PLAN]``.

    Args:
        items: one experience per row. lengths: their tokens. steps: row indices of each optimizer step.
        limit: the bound of a micro-batch, as keyword of `plan.micro_batches`.
    """
    per_rank: list[list[Experience]] = [[] for _ in range(ranks)]
    for members in steps:
        plan = micro_batches(members, lengths, ranks, **limit)
        tokens = float(sum(items[row].action_mask.sum() for row in members))
        speaking = float(sum(bool(items[row].action_mask.any()) for row in members))
        for mine, batches in zip(per_rank, plan, strict=True):
            own = sum(row != PADDING for batch in batches for row in batch)
            for number, (rows, batch) in enumerate(zip(batches, join(items, [batches]), strict=True), 1):
                share = sum(row != PADDING for row in rows) / max(own, 1)
                batch.info[PLAN] = [Place(number == len(batches), tokens, speaking, share)] * len(rows)
                mine.append(batch)
    return per_rank


def write_advantages(
    items: Sequence[Experience],
    rows: Sequence[Row],
    owners: Sequence[int],
    credit: Credit,
    step_of_row: Sequence[int],
    loss_agg: str,
) -> None:
    """Put every turn's value, times its loss weight, on the turn's response tokens and zero elsewhere.

    Args:
        items: one experience per row. owners: each row's trajectory. step_of_row: each row's optimizer step.
        loss_agg: what weighs the same, see `advantages.loss_weights`.
    """
    row, start, end = map(torch.tensor, locate(rows, owners, credit.sources))
    owner = torch.tensor(owners)[row]
    weights = advantages.loss_weights(loss_agg, torch.tensor(step_of_row)[row], owner, end - start)
    longest = max(len(r.tokens) for r in rows)
    tokens = advantages.to_tokens(credit.values * weights, row, start, end, len(rows), longest)
    for item, values in zip(items, tokens, strict=True):
        item.advantages = values[: len(item.action_mask)].clone()
        item.returns = item.advantages.clone()
        item.info["return"] = item.rewards.float()
        item.kl = None

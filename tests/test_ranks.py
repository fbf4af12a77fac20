"""C2: uneven rows over any number of data-parallel ranks give the gradients of plain PyTorch without any padding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.records import StepRecord, Trajectory

pytestmark = pytest.mark.stack
TURNS = [1, 7, 2, 4, 3, 11, 2, 5, 1]  # 36 turn rows
BATCH_SIZE = 5  # trajectories per optimizer step: two steps


@pytest.fixture(scope="module", autouse=True)
def host():
    from openrlhf_bipace.integration import cpu

    if cpu.needed():
        cpu.install()


def trajectories(window: bool) -> list[Trajectory]:
    rng = random.Random(0)
    out = []
    for sample, turns in enumerate(TURNS):
        steps = []
        for turn in range(turns):
            response = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 9))]
            step = StepRecord(
                turn=turn,
                observation=str(rng.randrange(4)),
                prompt_ids=[rng.randrange(3, 60) for _ in range(rng.randrange(2, 12))],
                response_ids=response,
                new_row=window or turn == 0,
                text="",
                action=str(response[0] % 3),
                valid=True,
                reward=rng.random(),
                finish_reason="stop",
            )
            steps.append(step)
        out.append(Trajectory("g", sample, {}, steps))
    return out


def items_of(group, model, loss_agg="token"):
    """One experience per row: advantages of gigpo, other policies' log-probabilities within reach of the model's."""
    from openrlhf_bipace.advantages.pipeline import CreditPipeline
    from openrlhf_bipace.integration.batches import row_item, write_advantages
    from openrlhf_bipace.rollout.plan import optimizer_steps
    from openrlhf_bipace.rollout.rows import rows_of

    credit = CreditPipeline("gigpo", BipaceConfig()).run(group)
    owners, rows = zip(*[(i, row) for i, t in enumerate(group) for row in rows_of(t)], strict=True)
    items = [row_item(group[i], row) for i, row in zip(owners, rows, strict=True)]
    steps = optimizer_steps(owners, len(group), BATCH_SIZE, random.Random(1))
    step_of_row = [next(s for s, members in enumerate(steps) if row in members) for row in range(len(rows))]
    write_advantages(items, rows, owners, credit, step_of_row, loss_agg)
    noise = torch.Generator().manual_seed(0)
    for item in items:
        mine = log_softmax(model, item)[1].detach()
        for name, scale in (("action_log_probs", 0.3), ("base_action_log_probs", 0.5), ("rollout_log_probs", 1.0)):
            shift = scale * (torch.rand(len(mine), generator=noise) - 0.5)
            setattr(item, name, (mine + shift) * item.action_mask)
    return items, steps


def log_softmax(model, item):
    """Of every next token, [T - 1, vocabulary], and of those that follow, [T - 1]."""
    every = model(item.sequences[None]).logits[0, :-1].float().log_softmax(-1)
    return every, every.gather(-1, item.sequences[1:, None])[:, 0]


def planned(items, steps, ranks, **limits):
    """What the experience maker sends to each rank."""
    from openrlhf_bipace.integration.batches import place_on_ranks

    return place_on_ranks(items, [len(item.sequences) for item in items], steps, ranks, limits)


def plain_gradients(model, items, steps):
    """Row by row, unpadded, in plain PyTorch: the loss of each optimizer step written out, then AdamW."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    out = []
    for members in steps:
        model.zero_grad()
        tokens = sum(int(items[row].action_mask.sum()) for row in members)
        for row in members:
            item = items[row]
            every, new = log_softmax(model, item)
            ratio = (new - item.action_log_probs).exp()
            clipped = ratio.clamp(0.8, 1.2)
            surrogate = torch.minimum(ratio * item.advantages, clipped * item.advantages)
            weight = (item.action_log_probs - item.rollout_log_probs).exp().clamp(0.5, 2.0)
            gap = item.base_action_log_probs - new
            kl = gap.exp() - gap - 1  # k3
            entropy = -(every.exp() * every).sum(-1)
            loss = -weight * surrogate + 0.1 * kl - 0.01 * entropy
            ((loss * item.action_mask).sum() / tokens).backward()
        out.append({name: p.grad.clone() for name, p in model.named_parameters()})
        adam.step()
    return out


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    from openrlhf_bipace.lab import tiny

    folder = tmp_path_factory.mktemp("ranks")
    tokenizer = tiny.build_tokenizer(tiny.corpus("rooms"))
    model = tiny.build_model(tokenizer, layers=2, hidden=32, heads=1, kv_heads=1, seed=0)
    tiny.save(model, tokenizer, folder / "model")
    return folder


def fresh_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    ).train()


@pytest.mark.parametrize(
    ("ranks", "stage", "limits"),
    [(1, 2, {"size": 8}), (2, 2, {"size": 8}), (4, 2, {"size": 3}), (2, 2, {"max_tokens": 60}), (1, 3, {"size": 8})],
)
def test_gradients_equal_the_unpadded_ones(train_ranks, model_folder, ranks, stage, limits):
    model = fresh_model(model_folder)
    items, steps = items_of(trajectories(window=True), model)
    assert len(items) == 36 and len(steps) == 2
    expected = plain_gradients(model, items, steps)
    written = train_ranks(model_folder, planned(items, steps, ranks, **limits), stage)
    for one in written:
        assert len(one["gradients"]) == len(steps)  # every rank takes the same optimizer steps
        for got, wanted in zip(one["gradients"], expected, strict=True):
            for name in wanted:
                torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5)
    # Padding rows stay out of the logs too.
    assert written[0]["status"]["reward"] == pytest.approx(float(sum(item.rewards for item in items) / 36), rel=1e-5)


@pytest.mark.parametrize("loss_agg", ["token", "turn", "trajectory"])
def test_full_rows_and_turn_rows_weigh_the_same(model_folder, loss_agg):
    """The same turns as 9 rows or as 36: the same loss per response token, so the same sum in every optimizer step."""
    scale = {}
    for window in (True, False):
        items, steps = items_of(trajectories(window), fresh_model(model_folder), loss_agg)
        scale[window] = [
            torch.stack([(items[row].advantages * items[row].action_mask).abs().sum() for row in members]).sum()
            / sum(int(items[row].action_mask.sum()) for row in members)
            for members in steps
        ]
    torch.testing.assert_close(scale[True], scale[False])

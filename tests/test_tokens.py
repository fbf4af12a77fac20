"""Step values on token columns: each step's own response tokens and nothing else."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf_bipace.advantages import loss_weights, to_tokens, write

R = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("reference.py"))))


def test_two_rows_with_different_masks():
    """[C1] Advantage 2 for both: 2 on each row's own response tokens only."""
    # Row 0: tokens 1 and 2 are the response. Row 1: tokens 3, 4 and 5. Column t predicts token t + 1.
    got = to_tokens([2.0, 2.0], rows=[0, 1], starts=[1, 3], ends=[3, 6], n_rows=2, length=7)
    assert got.dtype == torch.float32
    assert got.tolist() == [[2, 2, 0, 0, 0, 0], [0, 0, 2, 2, 2, 0]]


def test_several_turns_share_a_row():
    """4 action tokens, 3 feedback tokens, 5 action tokens: 9 columns are filled."""
    got = write([1.0, -0.5], [(2, 6), (9, 14)], length=16)
    assert got.tolist() == [0, 1, 1, 1, 1, 0, 0, 0, -0.5, -0.5, -0.5, -0.5, -0.5, 0, 0]
    assert int((got != 0).sum()) == 9


def test_touching_and_empty_spans():
    assert write([1.0, 2.0, 3.0], [(1, 3), (3, 3), (3, 4)], length=4).tolist() == [1, 1, 3]
    assert write([], [], length=3).tolist() == [0, 0]
    assert to_tokens([], [], [], [], 2, 3).tolist() == [[0, 0], [0, 0]]
    assert to_tokens([1.0], [1], [1], [1], 2, 1).shape == (2, 0)


def test_steps_may_come_in_any_order():
    rng = random.Random(0)
    spans, at = [], 1
    for _ in range(12):
        at += rng.randint(0, 3)
        spans.append((at, at := at + rng.randint(0, 4)))
    values = [rng.random() for _ in spans]
    order = rng.sample(range(12), 12)
    got = write([values[i] for i in order], [spans[i] for i in order], at + 2)
    assert got.tolist() == pytest.approx(R.write(values, spans, at + 2))


@pytest.mark.parametrize(
    ("rows", "starts", "ends", "message"),
    [
        ([0, 1], [1, 0], [2, 2], "step 1: tokens 0:2 of row 1, expected 1 <= start"),
        ([0, 1], [1, 3], [2, 6], "step 1: tokens 3:6 of row 1"),
        ([0, 1], [1, 3], [2, 2], "step 1: tokens 3:2 of row 1"),
        ([0, 2], [1, 1], [2, 2], r"step 1: tokens 1:2 of row 2, .* a row in 0 \.\. 1"),
        ([-1, 0], [1, 1], [2, 2], "step 0"),
        ([1, 1], [1, 2], [3, 4], "row 1: token 2 lies in the spans of 2 steps"),
        ([0], [1, 1], [2, 2], "lengths differ"),
    ],
)
def test_wrong_spans_are_named(rows, starts, ends, message):
    with pytest.raises(ValueError, match=message):
        to_tokens([1.0, 2.0], rows, starts, ends, n_rows=2, length=5)


def test_loss_weights_by_hand():
    """One step of 12 tokens: trajectory 0 has turns of 2 and 6 tokens, trajectory 1 one of 4."""
    given = [0, 0, 0], [0, 0, 1], [2, 6, 4]
    assert loss_weights("token", *given).tolist() == [1, 1, 1]
    # 12 / (3 turns x length); then each turn's tokens sum to 12 / 3.
    assert loss_weights("turn", *given).tolist() == [2, pytest.approx(2 / 3), 1]
    # 12 / (2 trajectories x 8 or 4 tokens); then each trajectory's tokens sum to 12 / 2.
    assert loss_weights("trajectory", *given).tolist() == [0.75, 0.75, 1.5]


@pytest.mark.parametrize("kind", ["token", "turn", "trajectory"])
def test_loss_weights_keep_the_scale_of_every_optimizer_step(kind):
    """A constant loss of 1 per token stays 1 in every step, whatever is averaged; a silent turn weighs nothing."""
    rng = torch.Generator().manual_seed(0)
    trajectory = torch.arange(12).repeat_interleave(4)
    step = trajectory // 5
    tokens = torch.randint(1, 30, (48,), generator=rng)
    tokens[7] = 0
    weights = loss_weights(kind, step, trajectory, tokens)
    for s in range(3):
        mine = step == s
        assert (weights * tokens)[mine].sum() / tokens[mine].sum() == pytest.approx(1.0)


def test_loss_weights_refuse_an_unknown_kind():
    with pytest.raises(ValueError, match="loss_agg: got 'row', allowed: token | turn | trajectory"):
        loss_weights("row", [0], [0], [1])

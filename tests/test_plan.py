"""Rows onto optimizer steps, ranks and micro-batches: nothing lost, nothing twice, every rank in step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_bipace.rollout.plan import PADDING, micro_batches, optimizer_steps


@given(
    turns=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    batch_size=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_steps_hold_every_row_once_and_whole_trajectories(turns, batch_size, seed):
    owner = [i for i, n in enumerate(turns) for _ in range(n)]
    steps = optimizer_steps(owner, len(turns), batch_size, random.Random(seed))
    assert sorted(row for step in steps for row in step) == list(range(len(owner)))
    assert all(steps)
    where = [{owner[row] for row in step} for step in steps]
    assert sum(len(w) for w in where) == len(set(owner))  # no trajectory is in two steps
    assert len(steps) == min(-(-len(turns) // batch_size), len(set(owner)))
    assert max(len(w) for w in where) <= min(w for w in map(len, where)) + 1


def test_steps_do_not_depend_on_turns():
    """16 trajectories of which one has 40 turns: batch size 8 makes two steps, as it would with one turn each."""
    owner = [0] * 40 + list(range(1, 16))
    assert len(optimizer_steps(owner, 16, 8, random.Random(0))) == 2


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    size=st.one_of(st.none(), st.integers(1, 7)),
)
def test_every_rank_gets_as_many_micro_batches_and_no_row_is_lost(lengths, ranks, size):
    limits = {"size": size} if size else {"max_tokens": 60}
    plan = micro_batches(range(len(lengths)), lengths, ranks, **limits)
    assert len(plan) == ranks and len({len(batches) for batches in plan}) == 1
    placed = [row for batches in plan for batch in batches for row in batch]
    assert sorted(row for row in placed if row != PADDING) == list(range(len(lengths)))
    for batch in (batch for batches in plan for batch in batches):
        assert batch == [PADDING] or PADDING not in batch
        if size:
            assert len(batch) <= size
        elif batch != [PADDING]:
            assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= 60


def test_36_rows_on_4_ranks():
    """C2: nine rows each; micro-batches of 8 and 1, the same on every rank, no padding needed."""
    plan = micro_batches(range(36), [10] * 36, 4, size=8)
    assert [[len(batch) for batch in batches] for batches in plan] == [[8, 1]] * 4


def test_tokens_are_balanced():
    lengths = [100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    first, second = micro_batches(range(11), lengths, 2, size=4)
    assert first[0] == [0] and first[1:] == [[PADDING]] * 2
    assert sum(len(batch) for batch in second) == 10


def test_the_order_is_the_seeds():
    owner = list(range(20))
    one, again, other = (optimizer_steps(owner, 20, 5, random.Random(seed)) for seed in (1, 1, 2))
    assert one == again and one != other


@pytest.mark.parametrize("ranks", [1, 3])
def test_fewer_rows_than_ranks(ranks):
    plan = micro_batches([0], [5], ranks, size=4)
    assert plan == [[[0]]] + [[[PADDING]]] * (ranks - 1)

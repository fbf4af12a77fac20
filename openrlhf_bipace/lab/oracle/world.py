"""Tasks of `rooms` under a fixed policy, and everything about it that dynamic programming can say exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from openrlhf_bipace.envs.rooms_solver import RoomsModel, Values, demonstrator_policy
from openrlhf_bipace.lab.oracle.geometry import Geometry

ACTION, FREE, PLAN = "action", "free", "plan"  # response kinds: see `Reasoning`
FREE_TOKENS, VOCABULARY = 3, 4  # reasoning tokens before an action, and how many tokens there are
PLAN_FAITHFUL = 0.8  # share of plan tokens that announce the action; the others are uniform
Phi = Callable[[int, str, int], np.ndarray]  # (context, observation, plan) -> hidden state [d]


@dataclass(slots=True)
class Reasoning:
    """What a response holds before its action. C contexts, A actions, K tokens.

    Neither: action-only responses. `free` alone: tokens independent of the action. With `plan`: one more token that
    depends on the action, so that the action's probability depends on it in turn.
    """

    free: np.ndarray | None = None  # [C, J, K] distributions of J independent tokens
    plan: np.ndarray | None = None  # [C, A, K] distribution of the plan token given the action


@dataclass(slots=True)
class Policy:
    """A policy of one task. A context is what it reads: a state, or a state in one of its wordings."""

    state: np.ndarray  # [C] int, index of the context's state in `RoomsModel.states`
    weight: np.ndarray  # [C] probability that its state shows as this context
    probs: np.ndarray  # [C, A] of each of `RoomsModel.actions`, reasoning summed out
    index: dict[str, int] | None = None  # observation -> context; None: the context is the state


@dataclass(slots=True)
class Truth:
    """Exact quantities of one task: T turns, S states, A actions."""

    discounted: Values  # with the estimators' gamma: what the step part estimates
    undiscounted: Values  # success from here on: what the episode part estimates
    occupancy: np.ndarray  # [T, S] probability of being in a state, the episode still open, after t turns


@dataclass
class World:
    """Tasks and a policy; contexts and actions of all tasks lie in common tables, padded with probability 0.

    Args:
        tasks: labels of `rooms` tasks, as in a prompt row.
        models: their `RoomsModel`.
        policies: one per task.
        gamma: discount of the estimators.
        horizon: turns per episode.
        phi: hidden states.
        reasoning: response kinds to take gradients for, by name.
    """

    tasks: list[dict[str, Any]]
    models: list[RoomsModel]
    policies: list[Policy]
    gamma: float
    horizon: int
    phi: Phi
    reasoning: dict[str, Reasoning]
    truths: list[Truth] = field(init=False)
    first: np.ndarray = field(init=False)  # [tasks + 1] number of each task's first context
    probs: np.ndarray = field(init=False)  # [C, A]
    stake: np.ndarray = field(init=False)  # [C, A] expected visits times undiscounted advantage, per episode

    def __post_init__(self) -> None:
        pairs = list(zip(self.models, self.policies, strict=True))
        self.truths = [solve(model, policy, self.gamma, self.horizon) for model, policy in pairs]
        self.first = np.cumsum([0, *(len(policy.state) for policy in self.policies)])
        width = max(len(model.actions) for model in self.models)
        self.probs = np.concatenate([_pad(policy.probs, width) for policy in self.policies])
        stakes = [_stake(policy, truth) for policy, truth in zip(self.policies, self.truths, strict=True)]
        self.stake = np.concatenate([_pad(stake, width) for stake in stakes])

    def context(self, task: int, state: int, observation: str) -> int:
        """Number of the context that the policy of `task` acts on."""
        index = self.policies[task].index
        return int(self.first[task]) + (state if index is None else index[observation])

    def success(self) -> float:
        """Exact success rate of the policy, mean over the tasks."""
        return float(np.mean([truth.undiscounted.v[0, 0] for truth in self.truths]))


def solve(model: RoomsModel, policy: Policy, gamma: float, horizon: int) -> Truth:
    """Values by backward and occupancy by forward dynamic programming in (turn, state)."""
    table = marginal(model, policy)
    occupancy = np.zeros((horizon, len(model.states)))
    occupancy[0, 0] = 1.0
    open_ = np.array([not state.done for state in model.states])
    for t in range(1, horizon):
        flow = occupancy[t - 1][:, None] * table
        occupancy[t] = open_ * np.bincount(model.next_state.ravel(), flow.ravel(), len(model.states))
    values = (model.policy_values(table, discount, horizon) for discount in (gamma, 1.0))
    return Truth(*values, occupancy)


def marginal(model: RoomsModel, policy: Policy) -> np.ndarray:
    """[S, A] the policy by state, its contexts averaged: each visit draws a wording afresh."""
    table = np.zeros(model.next_state.shape)
    np.add.at(table, policy.state, policy.weight[:, None] * policy.probs)
    return table


def tabular(
    tasks: Sequence[dict[str, Any]], geometry: Geometry, *, gamma: float, horizon: int, seed: int, **errors: float
) -> World:
    """The flawed demonstrator as a softmax over the accepted commands of each state, whatever the wording.

    Every accepted command has a positive probability, so the logits are its logarithms. `seed` draws the distributions
    of the free reasoning tokens; `errors` as in `rooms_solver.demonstrator_probs`.
    """
    models = [RoomsModel(task) for task in tasks]
    policies = [_table(demonstrator_policy(model, **errors)) for model in models]
    ids = [state.id for model in models for state in model.states]
    states = sum(len(model.states) for model in models)
    width = max(len(model.actions) for model in models)
    rng = np.random.default_rng([seed, 1])
    free = rng.dirichlet(np.ones(VOCABULARY), (states, FREE_TOKENS))
    announced = np.eye(VOCABULARY)[np.arange(width) % VOCABULARY]
    plan = np.broadcast_to(PLAN_FAITHFUL * announced + (1 - PLAN_FAITHFUL) / VOCABULARY, (states, width, VOCABULARY))
    reasoning = {ACTION: Reasoning(), FREE: Reasoning(free), PLAN: Reasoning(free, plan)}

    vector = cache(geometry.vector)
    return World(
        list(tasks), models, policies, gamma, horizon, lambda context, text, _: vector(ids[context], text), reasoning
    )


def _table(probs: np.ndarray) -> Policy:
    return Policy(np.arange(len(probs)), np.ones(len(probs)), probs)


def _stake(policy: Policy, truth: Truth) -> np.ndarray:
    expected = (truth.occupancy[..., None] * truth.undiscounted.advantage).sum(axis=0)
    return policy.weight[:, None] * policy.probs * expected[policy.state]


def _pad(table: np.ndarray, width: int) -> np.ndarray:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])))

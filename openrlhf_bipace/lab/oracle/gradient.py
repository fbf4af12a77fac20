"""Policy gradients of a tabular softmax, in closed form: of a sample under any advantages, and the exact one.

A response is a few categorical draws ("heads"), each with a table of logits by context. The gradient of the log
probability of choice k in context c with respect to the logits of c is onehot(k) - p(c). The trainer's loss is the
mean over response tokens, so a sample's gradient is the sum over turns of advantage x score over the count of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from openrlhf_bipace.lab.oracle.sample import Rows
from openrlhf_bipace.lab.oracle.world import Reasoning, World


@dataclass(slots=True)
class Head:
    """One draw of every row: which context it was made in and what came out."""

    probs: np.ndarray  # [C, K]
    context: np.ndarray  # [N] int
    choice: np.ndarray  # [N] int

    def scores(self) -> sparse.csr_matrix:
        """[N, C * K] onehot(choice) - p(context): the gradient of each row's log probability."""
        c, k = self.probs.shape
        row, column = np.nonzero(self.probs)
        spread = sparse.csr_matrix((self.probs[row, column], (row, row * k + column)), shape=(c, c * k))
        n = len(self.context)
        taken = sparse.csr_matrix((np.ones(n), (np.arange(n), self.context * k + self.choice)), shape=(n, c * k))
        return taken - spread[self.context]


def heads(
    world: World, reasoning: Reasoning, context: np.ndarray, action: np.ndarray, free: np.ndarray, plan: np.ndarray
) -> list[Head]:
    """The draws behind N turns: [N] contexts and actions, [N, J] free tokens, [N] plan tokens; free heads first."""
    out = []
    if reasoning.free is not None:
        out += [Head(reasoning.free[:, j], context, free[:, j]) for j in range(reasoning.free.shape[1])]
    if reasoning.plan is None:
        return [*out, Head(world.probs, context, action)]
    joint = world.probs[..., None] * reasoning.plan  # [C, A, K]
    announced = joint.sum(axis=1)
    count = announced.shape[1]
    given = joint / np.where(announced > 0, announced, 1.0)[:, None]
    given = given.transpose(0, 2, 1).reshape(-1, joint.shape[1])
    return [*out, Head(announced, context, plan), Head(given, context * count + plan, action)]


def exact_gradient(world: World, reasoning: Reasoning) -> list[np.ndarray]:
    """Per head [C * K] the gradient of the expected return, summed over the tasks, one episode of each.

    By the policy gradient theorem: every (context, action, plan) that can occur, weighted with its expected visits
    times its undiscounted advantage (`World.stake`). Without the free tokens: they move no return, so theirs is 0.
    """
    context, action = np.nonzero(world.probs)
    weight = world.stake[context, action]
    plan = np.zeros(len(context), dtype=int)
    if reasoning.plan is not None:
        count = reasoning.plan.shape[2]
        weight = (weight[:, None] * reasoning.plan[context, action]).ravel()
        context, action = np.repeat(context, count), np.repeat(action, count)
        plan = np.tile(np.arange(count), len(context) // count)
    nothing = np.zeros((len(context), 0), dtype=int)
    found = heads(world, Reasoning(plan=reasoning.plan), context, action, nothing, plan)
    return [head.scores().T @ weight for head in found]


@dataclass(slots=True)
class Directions:
    """Inner products of R batches' gradients g_r and the exact gradient g."""

    gram: np.ndarray  # [R, R] g_r . g_s
    along: np.ndarray  # [R] g_r . g
    exact: float  # |g|


class Compass:
    """Compares the gradients of R samples with one another and with the exact one, under any advantages.

    Args:
        world, reasoning: the policy and what its responses hold.
        rows: the samples' turns, concatenated.
        batch: [N] int, the sample of each row, 0 .. R-1.
    """

    def __init__(self, world: World, reasoning: Reasoning, rows: Rows, batch: np.ndarray) -> None:
        found = heads(world, reasoning, rows.context, rows.action, rows.free, rows.plan)
        exact = exact_gradient(world, reasoning)
        self.batch, self.batches = batch, int(batch.max()) + 1
        self.tokens = np.bincount(batch) * len(found)
        self.exact = float(np.sqrt(sum(g @ g for g in exact)))
        blind = [np.zeros(head.probs.size) for head in found[: len(found) - len(exact)]]
        self._parts = []
        for head, truth in zip(found, [*blind, *exact], strict=True):
            scores = head.scores()
            used = np.flatnonzero(scores.getnnz(axis=0))  # what no sample visits has gradient 0
            self._parts.append((scores[:, used], truth[used]))

    def directions(self, values: np.ndarray) -> Directions:
        """Under the advantages `values` [N]."""
        weights = sparse.csr_matrix((values, (self.batch, np.arange(len(values)))))
        gram, along = np.zeros((self.batches, self.batches)), np.zeros(self.batches)
        for scores, truth in self._parts:
            g = (weights @ scores).toarray() / self.tokens[:, None]
            gram += g @ g.T
            along += g @ truth
        return Directions(gram, along, self.exact)

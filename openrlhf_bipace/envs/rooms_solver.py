"""The truth about `rooms`: exact values by dynamic programming, the optimal command, and an imperfect demonstrator.

The demonstrator errs afresh at every step, so it is a Markov policy: what a perfect clone of its demonstrations would
do is `demonstrator_policy`, and that clone's success is exactly computable.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from openrlhf_bipace.envs.rooms import (
    CONTAINERS,
    HALL,
    ROOMS,
    SOLVED,
    TOOLS,
    TRANSFORMS,
    Instance,
    RoomsEnv,
    State,
    commands,
    instance_of,
    transition,
)

# The demonstrator's fixed misbeliefs, more often wrong than right at the default `p_systematic`: a greedy clone fails.
CARELESS_OBJECTS = ("towel", "book", "lamp")  # the next transform in the list instead of the one asked for
CONFUSED_ROOMS = {"bedroom": "study", "garden": "bathroom"}  # asked destination -> the one aimed for
FORCED_ROOMS = ("study", "garden")  # their containers get forced


@dataclass(slots=True)
class Values:
    """Exact values with `turns` taken so far as the first axis: T = horizon, S states, A actions (last one
    invalid)."""

    q: np.ndarray  # [T, S, A] float64
    v: np.ndarray  # [T, S]

    @property
    def advantage(self) -> np.ndarray:
        """[T, S, A]: q - v."""
        return self.q - self.v[..., None]


class RoomsModel:
    """The states reachable in one task and what each command does there.

    Attributes:
        states: [S] State, the start state first; `index` maps a state_id to its position.
        actions: [A] every command of the task, sorted, and as the last one "" for any text that is not a command;
            `action_index` maps a command to its position.
        next_state: [S, A] int64. A command not accepted in a state, and every command in a final state, leads back to
        it. reward: [S, A] float64.     admissible: [S, A] bool, never true for the last action.
    """

    def __init__(self, task: dict[str, Any] | Instance) -> None:
        self.instance = _instance(task)
        self.states = [self.instance.start_state]
        edges: dict[tuple[State, str], State] = {}
        seen = set(self.states)
        for state in self.states:  # grows while it is walked
            for command in commands(self.instance, state):
                after = edges[state, command] = transition(self.instance, state, command)
                if after not in seen:
                    seen.add(after)
                    self.states.append(after)
        self.index = {state.id: i for i, state in enumerate(self.states)}
        self.actions = [*sorted({command for _, command in edges}), ""]
        self.action_index = {command: i for i, command in enumerate(self.actions)}
        shape = (len(self.states), len(self.actions))
        self.next_state = np.repeat(np.arange(shape[0])[:, None], shape[1], axis=1)
        self.reward, self.admissible = np.zeros(shape), np.zeros(shape, dtype=bool)
        for (state, command), after in edges.items():
            cell = self.index[state.id], self.action_index[command]
            self.next_state[cell] = self.index[after.id]
            self.reward[cell] = float(after == SOLVED)
            self.admissible[cell] = True

    def optimal_values(self, gamma: float, horizon: int = RoomsEnv.max_turns) -> Values:
        """The best that can still be reached with `horizon` - t turns left."""
        return self._backward(gamma, horizon, lambda q, t: q.max(axis=-1))

    def policy_values(self, policy_probs: np.ndarray, gamma: float, horizon: int = RoomsEnv.max_turns) -> Values:
        """Values of a policy given as probabilities [S, A] or, one table per turn, [T, S, A].

        Probability on a command that a state does not accept counts as a turn without effect. ValueError for any other
        shape and for rows that do not sum to 1.
        """
        probs = np.asarray(policy_probs, dtype=np.float64)
        shape = (horizon, *self.next_state.shape)
        if probs.shape not in (shape, shape[1:]):
            raise ValueError(f"policy_probs: got shape {probs.shape}, allowed {shape[1:]} or {shape}")
        if not (np.all(probs >= 0) and np.allclose(probs.sum(axis=-1), 1.0)):
            raise ValueError("policy_probs: got rows that are no distributions, allowed probabilities that sum to 1")
        probs = np.broadcast_to(probs, shape)
        return self._backward(gamma, horizon, lambda q, t: (probs[t] * q).sum(axis=-1))

    def _backward(self, gamma: float, horizon: int, backup: Any) -> Values:
        q, v = np.zeros((horizon, *self.next_state.shape)), np.zeros((horizon + 1, len(self.states)))
        for t in reversed(range(horizon)):
            q[t] = self.reward + gamma * v[t + 1][self.next_state]
            v[t] = backup(q[t], t)
        return Values(q, v[:-1])


def optimal_command(task: dict[str, Any] | Instance, state: State) -> str:
    """The shortest way to the goal: the first command of it. In a hopeless state: carry on as if nothing was wrong.

    ValueError for a final state.
    """
    if state.done:
        raise ValueError(f"rooms: state: got {state.id!r}, allowed: a state in which the episode goes on")
    instance = _instance(task)
    transform = state.condition == "plain" and instance.transform != "plain"  # still to be done
    verb, noun = "take", instance.object
    if state.at in ("shut", "open"):
        room = instance.source
        if state.at == "shut":
            verb, noun = "open", CONTAINERS[room]
    elif state.at == "held":
        verb, room = TOOLS[instance.transform] if transform else ("put", instance.destination)
    elif state.at == instance.destination and not transform:
        return "look around"  # delivered; reached only when hopeless or with a mistaken goal
    else:
        room = state.at
    if state.room == room:
        return f"{verb} {noun}"
    return f"go {HALL if instance.hub and state.room != HALL else room}"


def demonstrator_probs(
    task: dict[str, Any] | Instance,
    state: State,
    *,
    p_random: float = 0.1,
    p_systematic: float = 0.65,
    p_force: float = 0.4,
) -> dict[str, float]:
    """Probability of each accepted command of `state` under the imperfect demonstrator.

    Args:
        p_random: the step is a uniformly random accepted command.
        p_systematic: acting on the misbelief about a careless object's transform, and likewise about a confused
            destination (two independent draws at each step).
        p_force: forcing the shut container with the object in it, in a room of FORCED_ROOMS.

    Raises ValueError for a probability outside 0..1 and for a final state.
    """
    for name, p in (("p_random", p_random), ("p_systematic", p_systematic), ("p_force", p_force)):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"rooms: {name}: got {p!r}, allowed: 0 to 1")
    if state.done:
        raise ValueError(f"rooms: state: got {state.id!r}, allowed: a state in which the episode goes on")
    instance = _instance(task)
    allowed = commands(instance, state)
    probs = dict.fromkeys(allowed, p_random / len(allowed))
    rest = 1.0 - p_random
    if state.at == "shut" and state.room == instance.source and state.room in FORCED_ROOMS:
        probs[f"force {CONTAINERS[state.room]}"] += rest * p_force
        rest *= 1.0 - p_force
    for transform, p_transform in _beliefs(instance.transform, _believed_transform(instance), p_systematic):
        believed = CONFUSED_ROOMS.get(instance.destination, instance.destination)
        for destination, p_destination in _beliefs(instance.destination, believed, p_systematic):
            goal = replace(instance, transform=transform, destination=destination)
            probs[optimal_command(goal, state)] += rest * p_transform * p_destination
    return probs


def demonstrator_policy(model: RoomsModel, **errors: float) -> np.ndarray:
    """The demonstrator as a table [S, A] for `RoomsModel.policy_values`; `errors` as in `demonstrator_probs`."""
    table = np.zeros(model.next_state.shape)
    for row, state in enumerate(model.states):
        if state.done:
            table[row, -1] = 1.0
            continue
        for command, p in demonstrator_probs(model.instance, state, **errors).items():
            table[row, model.action_index[command]] = p
    return table


def demonstration(task: dict[str, Any] | Instance, rng: random.Random, **errors: float) -> list[str]:
    """One imperfect demonstration: the commands, at most `RoomsEnv.max_turns`; `errors` as in `demonstrator_probs`.

    It stops early when the object was put down beyond rescue: what follows would only teach to idle.
    `rng` needs a `random()` method only, so numpy's generators serve too.
    """
    instance = _instance(task)
    state, taken = instance.start_state, list[str]()
    while not state.done and len(taken) < RoomsEnv.max_turns:
        if state.at in ROOMS and state.condition not in ("plain", instance.transform):
            break
        probs = demonstrator_probs(instance, state, **errors)
        draw = rng.random()
        for command in filter(probs.get, probs):  # those of probability 0 left out
            draw -= probs[command]
            if draw < 0:
                break
        taken.append(command)
        state = transition(instance, state, command)
    return taken


def _instance(task: dict[str, Any] | Instance) -> Instance:
    return task if isinstance(task, Instance) else instance_of(task)


def _believed_transform(instance: Instance) -> str:
    shift = int(instance.object in CARELESS_OBJECTS)
    return TRANSFORMS[(TRANSFORMS.index(instance.transform) + shift) % len(TRANSFORMS)]


def _beliefs(asked: str, believed: str, p_systematic: float) -> list[tuple[str, float]]:
    return [(asked, 1.0)] if asked == believed else [(asked, 1.0 - p_systematic), (believed, p_systematic)]

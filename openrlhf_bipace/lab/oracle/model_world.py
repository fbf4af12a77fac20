"""A tiny trained transformer as the policy of a world: its probabilities and hidden states, tabulated.

The policy reads one user message (template terse: observation and task) and nothing of the episode before, so it is
Markov and the dynamic programme is exact. It answers ``THOUGHT<action>COMMAND</action>``: the thought is drawn from
the model's probabilities of `THOUGHTS` (or there is none), the command from those of the accepted commands' words,
each scaled to sum to 1.
Observations are drawn afresh at every visit, so the policy of a state is the mean over its wordings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from openrlhf_bipace.envs import prompts
from openrlhf_bipace.envs.rooms import RoomsEnv, State, instance_of
from openrlhf_bipace.envs.rooms_solver import RoomsModel, demonstration
from openrlhf_bipace.envs.rooms_text import NOTHING_HAPPENS
from openrlhf_bipace.lab.oracle.world import ACTION, PLAN, Policy, Reasoning, World

THOUGHTS = tuple(f"<think> {words} </think>" for words in ("go on", "take care", "look here", "put it"))
LAYER = -2  # of three layers: the last whose output no final norm has touched
POSITIONS = ("prompt_end", "action_start")
CHUNK = 256  # prompts per forward
VOCABULARY = 768  # tokens; the words of `rooms` need no more


@dataclass(slots=True)
class Tables:
    """What the model says about every observation of one task: C contexts, A actions, K thoughts (1: none)."""

    policy: Policy
    thought: np.ndarray  # [C, A, K] distribution of the thought given the action
    phi: dict[str, np.ndarray]  # position -> [C, K, d] hidden states


def tabulate(tasks: Sequence[dict[str, Any]], *, thoughts: bool, seed: int, steps: int, episodes: int) -> list[Tables]:
    """Train a tiny model on single turns of the flawed demonstrator and tabulate it on every state of `tasks`.

    Args:
        tasks: `rooms` labels with "wordings".
        thoughts: answers begin with a thought that says nothing, drawn uniformly.
        seed: of the demonstrations, the weights and the batches.
        steps, episodes: of training, and demonstrated.
    """
    from openrlhf_bipace.lab import tiny, warmstart
    from openrlhf_bipace.rollout.context import ChatContext
    from openrlhf_bipace.rollout.rows import Row

    rng = random.Random(seed)
    texts = tiny.corpus("rooms", demonstrate=lambda task: demonstration(task, rng))
    tokenizer = tiny.build_tokenizer(texts, VOCABULARY)
    context = ChatContext(tokenizer)
    model = tiny.build_model(tokenizer, seed=seed, **warmstart.SETTINGS["rooms"].architecture)
    options = {key: tasks[0][key] for key in ("hub", "wordings") if key in tasks[0]}
    rows, opening = [], THOUGHTS if thoughts else ("",)
    for prompt, command in _turns(RoomsEnv.tasks("train", **options), episodes, rng):
        ids = context.first(prompt)
        answer = _ids(tokenizer, f"{rng.choice(opening)}<action>{command}</action>") + [tokenizer.eos_token_id]
        rows.append(Row(tokens=ids + answer, spans=[(len(ids), len(ids) + len(answer))]))
    warmstart.fit(model, rows, steps=steps, batch_size=48, seed=seed, progress=False)
    return [tabulate_task(model, tokenizer, context, task, opening) for task in tasks]


def world_of(
    tasks: Sequence[dict[str, Any]], tables: list[Tables], position: str, gamma: float, horizon: int
) -> World:
    """The world in which the tabulated model acts and its hidden state is read at `position`."""
    phi = np.concatenate([table.phi[position] for table in tables])
    plan = None
    if phi.shape[1] > 1:
        width = max(table.thought.shape[1] for table in tables)
        padded = [np.pad(t.thought, ((0, 0), (0, width - t.thought.shape[1]), (0, 0))) for t in tables]
        plan = np.concatenate(padded)
    reasoning = {ACTION: Reasoning()} if plan is None else {PLAN: Reasoning(plan=plan)}
    policies = [table.policy for table in tables]
    models = [RoomsModel(task) for task in tasks]
    return World(
        list(tasks), models, policies, gamma, horizon, lambda context, _, thought: phi[context, thought], reasoning
    )


def texts_of(task: dict[str, Any], states: Sequence[State]) -> list[list[str]]:
    """Every text that the environment has for each of `states`, in alphabetical order."""
    env = RoomsEnv()
    wanted = task.get("wordings", 3) ** 3
    found: list[set[str]] = [set() for _ in states]
    for state, texts in zip(states, found, strict=True):
        seed = 0
        while len(texts) < wanted:
            env.reset({**task, "visit_seed": seed})
            env.state, seed = state, seed + 1
            texts.add(env.step("").text.removeprefix(NOTHING_HAPPENS))
    return [sorted(texts) for texts in found]


def _prompt(goal: str, observation: str) -> str:
    return prompts.next_user(goal, observation, admissible=(), show_admissible=False, template="terse")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _turns(tasks: list[dict[str, Any]], episodes: int, rng: random.Random) -> list[tuple[str, str]]:
    """(user message, command) of every turn of `episodes` demonstrations."""
    env, out = RoomsEnv(), []
    for k in range(episodes):
        task = tasks[k % len(tasks)]
        now, goal = env.reset({**task, "visit_seed": rng.getrandbits(31)}), instance_of(task).goal
        for command in demonstration(task, rng):
            out.append((_prompt(goal, now.text), command))
            now = env.step(command)
    return out


def tabulate_task(model: Any, tokenizer: Any, context: Any, task: dict[str, Any], thoughts: Sequence[str]) -> Tables:
    rooms = RoomsModel(task)
    open_ = [i for i, state in enumerate(rooms.states) if not state.done]
    texts = texts_of(task, [rooms.states[i] for i in open_])
    every = [(i, text, 1 / len(group)) for i, group in zip(open_, texts, strict=True) for text in group]
    ids = [context.first(_prompt(rooms.instance.goal, text)) for _, text, _ in every]
    openings = [_ids(tokenizer, f"{thought}<action>") for thought in thoughts]
    commands = [_ids(tokenizer, command) for command in rooms.actions[:-1]]
    thought_logp, action_logp, phi = score_answers(model, ids, openings, commands)
    allowed = rooms.admissible[[i for i, *_ in every]][:, None, :-1]
    given = torch.from_numpy(np.where(allowed, action_logp, -np.inf)).softmax(-1).numpy()  # [C, K, A - 1]
    joint = torch.from_numpy(thought_logp).softmax(-1).numpy()[..., None] * given
    probs = joint.sum(axis=1)
    thought = (joint / np.where(probs > 0, probs, 1.0)[:, None]).transpose(0, 2, 1)
    closed = [i for i, state in enumerate(rooms.states) if state.done]
    policy = Policy(
        state=np.array([*(i for i, *_ in every), *closed]),
        weight=np.array([*(weight for *_, weight in every), *(1.0 for _ in closed)]),
        probs=np.concatenate([np.pad(probs, ((0, 0), (0, 1))), _ended(len(closed), len(rooms.actions))]),
        index={text: c for c, (_, text, _) in enumerate(every)},
    )
    return Tables(policy, _grow(thought, len(closed), 1), {k: _grow(v, len(closed), 0) for k, v in phi.items()})


def _ended(states: int, actions: int) -> np.ndarray:
    """The policy of final states: whatever is said there does nothing."""
    return np.eye(actions)[[-1] * states]


def _grow(table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Zeros for the final states, and for the action that is no command."""
    return np.pad(table, ((0, rows), (0, columns), (0, 0)))


@torch.no_grad()
def score_answers(
    model: Any, prompts_ids: list[list[int]], openings: list[list[int]], commands: list[list[int]]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """What the model makes of C prompts, K openings (a thought and the tag) and A commands, all as token ids.

    Returns the log-probabilities of the openings [C, K] and of the commands after them [C, K, A], and the hidden
    states [C, K, d] by position.
    """
    count, k = len(prompts_ids), len(openings)
    thought, action = np.zeros((count, k)), np.zeros((count, k, len(commands)))
    phi = {position: np.zeros((count, k, model.config.hidden_size), dtype=np.float32) for position in POSITIONS}
    order = sorted(range(count), key=lambda i: len(prompts_ids[i]))
    for _, same in groupby(order, key=lambda i: len(prompts_ids[i])):  # equal lengths need no padding
        same = list(same)
        for rows in (same[i : i + CHUNK] for i in range(0, len(same), CHUNK)):
            head = model(torch.tensor([prompts_ids[i] for i in rows]), use_cache=True, output_hidden_states=True)
            phi["prompt_end"][rows] = head.hidden_states[LAYER][:, -1:].numpy()
            for z, opening in enumerate(openings):
                ids = torch.tensor([opening]).expand(len(rows), -1)
                tail = model(ids, past_key_values=head.past_key_values, use_cache=True, output_hidden_states=True)
                before = torch.cat([head.logits[:, -1:], tail.logits[:, :-1]], dim=1).log_softmax(-1)
                thought[rows, z] = before.gather(2, ids[..., None])[..., 0].double().sum(dim=1).numpy()
                phi["action_start"][rows, z] = tail.hidden_states[LAYER][:, -1].numpy()
                found = torch.zeros(len(rows), len(commands), dtype=torch.float64)
                _branch(model, head.past_key_values, tail.logits[:, -1], list(enumerate(commands)), found)
                action[rows, z] = found.numpy()
                head.past_key_values.crop(-len(opening))
    return thought, action, phi


def _branch(
    model: Any, cache: Any, logits: torch.Tensor, commands: list[tuple[int, list[int]]], out: torch.Tensor
) -> None:
    """Add to `out` [B, A] the log-probabilities of the (column, rest of its ids) in `commands`.

    One forward per prefix that commands share. `logits` [B, vocabulary] are the last ones of what is in `cache`,
    which is left as it was.
    """
    logp = logits.log_softmax(-1).double()
    for token, group in groupby(sorted(commands, key=lambda c: c[1][0]), key=lambda c: c[1][0]):
        rest = []
        for column, ids in group:
            out[:, column] += logp[:, token]
            rest += [(column, ids[1:])] if len(ids) > 1 else []
        if rest:
            step = model(torch.full((len(logits), 1), token), past_key_values=cache, use_cache=True)
            _branch(model, cache, step.logits[:, -1], rest, out)
            cache.crop(-1)

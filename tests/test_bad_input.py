"""Bad input ends before a model loads, with one message that names the flag, what was got and what is allowed."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.stack  # the checks run behind upstream's own command line, which imports the whole host


@pytest.fixture
def refusal(tiny, rooms_tasks, helpers, tmp_path, monkeypatch, capsys):
    """Run the command line with some flags changed (``...`` drops one); the message it ends with."""

    def run(**changes):
        from openrlhf_bipace.cli import train_ppo_ray

        flags = helpers.base_flags(tiny.folder, rooms_tasks.train, tmp_path)
        flags |= {name.replace("__", "."): value for name, value in changes.items()}
        flags = {name: value for name, value in flags.items() if value is not ...}
        monkeypatch.setattr(sys, "argv", ["bipace-train", *helpers.argv(flags)])
        with pytest.raises(SystemExit) as stop:
            train_ppo_ray.main()
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2
        assert message.startswith("bipace-train: error: ")
        return message

    return run


def test_unknown_estimator(refusal):
    message = refusal(algo__advantage__estimator="bipace_z")
    assert "--algo.advantage.estimator" in message and "'bipace_z'" in message and "bipace_q" in message


def test_unknown_environment(refusal):
    message = refusal(agent__env="romms")
    assert "--agent.env: unknown environment 'romms'; known: " in message and "rooms, textcraft" in message


@pytest.mark.parametrize("layer", [-1, 0, -9])
def test_layer_out_of_range(refusal, layer):
    message = refusal(bipace__layer=layer)
    assert f"--bipace.layer: got {layer}, allowed" in message


def test_one_sample_per_prompt(refusal):
    message = refusal(rollout__n_samples_per_prompt=1, train__batch_size=4)
    assert "--rollout.n_samples_per_prompt: got 1, allowed with bipace_q: 2 or more" in message


def test_kl_in_the_reward(refusal):
    message = refusal(algo__kl__init_coef=0.01)
    assert "--algo.kl.init_coef: got 0.01 without --algo.kl.use_loss" in message


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("train.dynamic_batch_enable", None),
        ("ds.ring_attn_size", 2),
        ("ds.tensor_parallel_size", 2),
        ("ds.lora.rank", 8),
        ("data.max_images_per_prompt", 1),
        ("critic.model_name_or_path", "some/critic"),
        ("reward.clip_range", [-1, 1]),
        ("reward.overlong_buffer_len", 8),
        ("actor.loss_agg_mode", "seq-mean-token-mean"),
        ("actor.policy_loss_type", "gspo"),
        ("algo.advantage.is_correction_level", "seq"),
        ("algo.advantage.gamma", 0.9),
        ("vllm.num_engines", 0),
        ("vllm.sync_backend", "nccl"),
        ("ds.attn_implementation", "flash_attention_2"),
        ("ds.packing_samples", None),
        ("train.enable_ema", None),
        ("bipace.epsilon", 3.0),
        ("bipace.shrink", -1.0),
    ],
)
def test_unsupported_flag(refusal, flag, value):
    message = refusal(**{flag.replace(".", "__"): value})
    assert f"--{flag}: got " in message and "allowed" in message


def test_window_without_room_for_a_prompt(refusal):
    message = refusal(agent__context="window", agent__max_turn_tokens=512)
    assert (
        "--agent.max_turn_tokens: got 512, allowed with --agent.context window: less than --data.max_len (512)"
        in message
    )


def test_turn_rows_need_an_estimator_that_knows_turns(refusal):
    message = refusal(agent__context="window", algo__advantage__estimator="group_norm")
    assert "--agent.context: got window, allowed with --algo.advantage.estimator group_norm: full" in message


def test_a_run_folder_of_another_run(refusal, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    message = refusal(bipace__run_dir=tmp_path)
    assert "which holds another run's metrics.jsonl" in message and "--ckpt.load_enable" in message


def test_zero3_with_several_cpu_ranks(refusal):
    message = refusal(ds__zero_stage=3, actor__num_gpus_per_node=2)
    assert "--ds.zero_stage: got 3 with 2 policy ranks, allowed without CUDA: 2, or 3 with one rank" in message


def test_estimator_without_environment(refusal):
    message = refusal(agent__env=...)
    assert "--agent.env is needed too" in message and "bipace_q" in message


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        ("not json", "Expecting value"),
        ('["a", "list"]', "a JSON object is needed"),
        (json.dumps({"env": "textcraft", "task_id": 0, "split": "train"}), '"env": "rooms"'),
        (json.dumps({"env": "rooms", "task_id": 100000, "split": "train"}), "task_id"),
        (json.dumps({"env": "rooms", "task_id": 0, "split": "training"}), "split"),
    ],
)
def test_malformed_task(refusal, rooms_tasks, tmp_path, label, complaint):
    good = rooms_tasks.train.read_text().splitlines()[0]
    bad = tmp_path / "bad.jsonl"
    bad.write_text(good + "\n" + json.dumps({"input": "", "label": label}) + "\n")
    message = refusal(data__prompt_dataset=bad)
    assert f"--data.prompt_dataset {bad}, row 2, column 'label'" in message and complaint in message


def test_missing_label_column(refusal):
    assert "--data.label_key: got 'task', allowed for" in refusal(data__label_key="task")


def test_missing_dataset(refusal):
    assert "--data.prompt_dataset: got '/nowhere/tasks.jsonl'" in refusal(data__prompt_dataset="/nowhere/tasks.jsonl")


def test_missing_model(refusal):
    assert "--actor.model_name_or_path: got '/nowhere/model'" in refusal(actor__model_name_or_path="/nowhere/model")


@pytest.mark.parametrize("flag", ["bipace.run_dir", "ckpt.output_dir", "ckpt.path"])
def test_unwritable_folder(refusal, tmp_path, flag):
    (tmp_path / "file").write_text("")  # root may write anywhere, but nobody below a file
    message = refusal(**{flag.replace(".", "__"): tmp_path / "file" / "below"})
    assert f"--{flag}: got " in message and "a writable folder" in message


def test_wrong_host_version(monkeypatch):
    """C24: the message names both versions."""
    from openrlhf_bipace.integration import host

    monkeypatch.setitem(host.VERSIONS, "ray", "9.9.9")
    with pytest.raises(RuntimeError, match=r"ray 2\.55\.0 is installed, openrlhf_bipace was tested with 9\.9\.9"):
        host.check_versions()
    assert host.check_versions(allow_unknown=True) == [
        "ray 2.55.0 is installed, openrlhf_bipace was tested with 9.9.9"
    ]


def test_missing_host_package(monkeypatch):
    from openrlhf_bipace.integration import host

    monkeypatch.setitem(host.VERSIONS, "no-such-package", "1.0")
    with pytest.raises(RuntimeError, match="no-such-package is not installed"):
        host.check_versions()

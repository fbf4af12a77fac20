"""``python -m openrlhf.cli.train_ppo_ray`` with BiPACE: every upstream flag, plus --bipace.* and --agent.*.

Upstream builds its parser and validates inside ``if __name__ == "__main__"``, so its module is run as it is. Where it
parses its flags we add ours, check everything before a model loads and put our classes where it looks for its own.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from openrlhf_bipace.config import AgentConfig, BipaceConfig, LaunchConfig, add_flags, from_args
from openrlhf_bipace.integration import cpu, host, readiness
from openrlhf_bipace.launch.placement import Layout
from openrlhf_bipace.runs import STOPPED, StopRequested

SECRET_FLAG = "logger.wandb.key"
_parse_args = argparse.ArgumentParser.parse_args


def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
    """Stands in for ``parser.parse_args`` on upstream's finished parser: our flags added, everything checked."""
    argparse.ArgumentParser.parse_args = _parse_args
    # A dry run plans for GPUs wherever it is typed, a login node for instance.
    without_cuda = cpu.needed() and "--dry_run" not in (args or sys.argv)
    parser.prog = "bipace-train"
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")  # without pages of usage
    _extend(parser, without_cuda)
    parsed = parser.parse_args(args, namespace)
    try:
        return _prepare(parsed, without_cuda)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))


def _extend(parser: argparse.ArgumentParser, without_cuda: bool) -> None:
    """Our flags and estimators, and without CUDA the defaults that work there."""
    from openrlhf_bipace import advantages

    for action in parser._actions:
        flag = action.option_strings[0]
        if flag == host.ESTIMATOR_FLAG:
            action.choices = [*action.choices, *advantages.names()]
            action.help = f"{action.help}; with --agent.env also openrlhf_bipace's: {', '.join(advantages.names())}"
        if without_cuda and flag in cpu.DEFAULTS:
            action.default = cpu.DEFAULTS[flag]
        action.help = action.help or "as in OpenRLHF"  # the formatter shows a default only beside a help text
    add_flags(parser)
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print which actor goes on which node and GPU and what memory it needs, refuse what cannot fit, and end",
    )


def _prepare(args: Any, without_cuda: bool) -> Any:
    """Check, make the run folder, install our classes, connect to Ray. Returns the namespace for upstream."""
    from openrlhf_bipace import envs
    from openrlhf_bipace.integration import startup

    bipace: BipaceConfig = from_args("bipace", args)
    agent: AgentConfig = from_args("agent", args)
    for complaint in host.check_versions(bipace.allow_unknown_host):
        print(f"[openrlhf_bipace] {complaint}", file=sys.stderr)
    bipace.run_dir = str(Path(bipace.run_dir or f"runs/{getattr(args, 'logger.wandb.run_name')}").absolute())
    agent.env = envs.absolute(agent.env)
    agent.data = agent.data and str(Path(agent.data).absolute())
    startup.check(args, bipace, agent, without_cuda)
    launch: LaunchConfig = from_args("launch", args)
    dry_run = args.dry_run
    for flag in [name for name in vars(args) if name.startswith(("bipace.", "agent.", "launch.", "dry_run"))]:
        delattr(args, flag)
    args.bipace, args.agent = bipace, agent
    if agent.env:
        setattr(args, "reward.remote_url", "agent")  # as upstream marks an agent's reward
    if dry_run:
        _dry_run(args, launch)
    if agent.env:
        _create_run_folder(args, bipace)
    _install(args, bipace, agent, without_cuda)
    _connect(args, launch, without_cuda)
    return args


def _dry_run(args: Any, launch: LaunchConfig) -> NoReturn:
    from openrlhf_bipace.launch.dry_run import plan

    text, refused = plan(vars(args), launch)
    print(text)
    if refused:
        raise ValueError("does not fit: " + "; ".join(refused))
    raise SystemExit(0)


def _create_run_folder(args: Any, bipace: BipaceConfig) -> None:
    from dataclasses import asdict

    from openrlhf_bipace import __version__
    from openrlhf_bipace.runs import RunFolder

    folder = RunFolder(bipace.run_dir)
    folder.create()
    flags = {k: v for k, v in vars(args).items() if k not in ("bipace", "agent", SECRET_FLAG)}
    secret = getattr(args, SECRET_FLAG)
    folder.write_config(
        {
            "command": [word.replace(secret, "HIDDEN") if secret else word for word in sys.argv],
            "flags": flags,
            "bipace": asdict(bipace),
            "agent": asdict(args.agent),
            "versions": {"openrlhf_bipace": __version__, **{p: host.installed_version(p) for p in host.VERSIONS}},
        }
    )
    print(f"[openrlhf_bipace] run folder: {bipace.run_dir}")


def _install(args: Any, bipace: BipaceConfig, agent: AgentConfig, without_cuda: bool) -> None:
    rollout_arguments: dict[str, Any] = {}
    rollout = None
    if without_cuda:
        os.environ[cpu.DTYPE_VARIABLE] = bipace.cpu_dtype
        rollout_arguments |= cpu.rollout_arguments()
    if agent.env:
        from openrlhf_bipace.integration.async_trainer import AsyncAgentTrainer
        from openrlhf_bipace.integration.rollout_actor import RolloutActor
        from openrlhf_bipace.integration.trainer import AgentTrainer

        rollout_arguments["agent_config"] = agent
        rollout = RolloutActor
        host.install_trainers(AgentTrainer, AsyncAgentTrainer)
    host.install_rollout(rollout, rollout_arguments)
    if without_cuda:
        print(
            "[openrlhf_bipace] no CUDA device: CPU backend on (DeepSpeed over gloo, vLLM's CPU build, "
            f"{bipace.cpu_dtype} parameters)"
        )


def _connect(args: Any, launch: LaunchConfig, without_cuda: bool) -> None:
    """Join or start Ray, and refuse a cluster that cannot hold what the flags ask for."""
    layout = Layout.from_flags(vars(args))
    layout.check()
    if without_cuda:
        cpu.start_ray(layout.gpus)
    else:
        readiness.connect()
    readiness.require_gpus(layout.gpus, launch.deadline)


def main() -> None:
    """Entry point of ``bipace-train``."""
    try:
        host.check_versions("--bipace.allow_unknown_host" in sys.argv)
    except RuntimeError as error:
        raise SystemExit(f"bipace-train: error: {error}") from None
    if cpu.needed():
        cpu.install()
    from openrlhf_bipace.integration.policy import PolicyActor, ReferenceActor

    host.install_models(PolicyActor, ReferenceActor)
    argparse.ArgumentParser.parse_args = parse_args
    try:
        runpy.run_module(host.OPENRLHF_CLI, run_name="__main__", alter_sys=False)
    except StopRequested as stop:
        print(f"[openrlhf_bipace] {str(stop).splitlines()[-1]}; --ckpt.load_enable goes on from there")
        raise SystemExit(STOPPED) from None


if __name__ == "__main__":
    main()

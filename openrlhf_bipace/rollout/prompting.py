"""What the policy reads at each turn: the growing conversation, or a window of it rebuilt every turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs import prompts
from openrlhf_bipace.records import StepRecord
from openrlhf_bipace.rollout.context import ChatContext


@dataclass(slots=True)
class Prompt:
    """What one turn starts from."""

    context: list[int]  # every token the policy reads
    new: list[int]  # of these, the ones after the previous response (all of them if `new_row`)
    new_row: bool  # the turn starts a training row of its own
    history_cut: int = 0  # turns of history left out for length


class FullContext:
    """The whole conversation: each turn's prompt extends the one before by the response and the new observation."""

    def __init__(self, config: AgentConfig, chat: ChatContext, instructions: str, task: str, max_turns: int) -> None:
        self.config, self.chat, self.instructions = config, chat, instructions
        self.task, self.max_turns = task, max_turns
        self._context: list[int] = []

    def prompt(self, observation: str, admissible: list[str], steps: list[StepRecord]) -> Prompt:
        """Tokens of the turn that follows `steps`."""
        shown: dict[str, Any] = {"admissible": admissible, "show_admissible": self.config.show_admissible}
        template = self.config.template
        if not steps:
            user = prompts.first_user(
                self.task,
                observation,
                instructions=self.instructions,
                template=template,
                max_turns=self.max_turns,
                **shown,
            )
            new = self.chat.first(user)
        else:
            response = steps[-1].response_ids
            new = self.chat.next(response, prompts.next_user(self.task, observation, template=template, **shown))
            self._context = self._context + response
        self._context = self._context + new
        return Prompt(self._context, new, not steps)


class WindowContext:
    """One prompt per turn: the task, the last `--agent.history` turns and the current observation [paper, verl-agent].

    A prompt that leaves less than a whole response's budget of `max_length` loses its oldest turns of history first.
    """

    def __init__(
        self,
        config: AgentConfig,
        chat: ChatContext,
        instructions: str,
        task: str,
        max_turns: int,
        max_length: int,
    ) -> None:
        self.config, self.chat, self.instructions = config, chat, instructions
        self.task, self.max_turns = task, max_turns
        self.room = max_length - config.max_turn_tokens

    def prompt(self, observation: str, admissible: list[str], steps: list[StepRecord]) -> Prompt:
        """Tokens of the turn that follows `steps`."""
        kept = [(step.observation, step.executed or step.action) for step in steps]
        kept = kept[max(len(kept) - self.config.history, 0) :]
        wanted = len(kept)
        while True:
            user = prompts.window_user(
                self.task,
                observation,
                history=kept,
                instructions=self.instructions,
                template=self.config.template,
                admissible=admissible,
                show_admissible=self.config.show_admissible,
                turn=len(steps),
                max_turns=self.max_turns,
            )
            ids = self.chat.first(user)
            if len(ids) <= self.room or not kept:
                return Prompt(ids, ids, True, wanted - len(kept))
            kept = kept[1:]

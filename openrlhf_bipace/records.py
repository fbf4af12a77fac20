"""What one rollout is made of: plain records that every layer of the package shares.

Token ids are always the ids the engine sampled or was given; nothing here is ever re-tokenised.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class EndReason(enum.StrEnum):
    """Why a trajectory ended. Exactly one reason per trajectory."""

    DONE = "done"  # the environment said so (success or failure)
    TURN_LIMIT = "turn_limit"  # the turn cap was reached with the episode still open
    CONTEXT_FULL = "context_full"  # no token budget was left for another response
    ENV_ERROR = "env_error"  # the environment raised
    ENV_TIMEOUT = "env_timeout"  # the environment did not answer in time

    @property
    def failed(self) -> bool:
        """The rollout says nothing about the policy: leave it out of every baseline."""
        return self in (EndReason.ENV_ERROR, EndReason.ENV_TIMEOUT)

    @property
    def truncated(self) -> bool:
        """The episode was cut off by a budget rather than ended by the environment."""
        return self in (EndReason.TURN_LIMIT, EndReason.CONTEXT_FULL)


@dataclass(slots=True)
class StepRecord:
    """One turn: what the policy read, what it sampled, what the environment said about it.

    Example (turn 1 of a full-context trajectory)::

        StepRecord(turn=1, observation="You are in the hall.", prompt_ids=[9, 4, 7], response_ids=[12, 5, 2],
                   new_row=False, text="<action>go kitchen</action>", action="go kitchen", ...)
    """

    turn: int  # 0, 1, 2, ... in time order
    observation: str  # the raw environment text the policy acted on (no prompt template around it)
    prompt_ids: list[int]  # token ids fed since the end of the previous response (all of them if `new_row`)
    response_ids: list[int]  # token ids as sampled, the end-of-turn token included when it was sampled
    new_row: bool  # this turn starts a training row of its own; False: it continues the row of the turn before
    text: str  # `response_ids` decoded, special tokens removed
    action: str  # the command sent to the environment ("" when the response did not parse)
    valid: bool  # the response parsed into an action; whether the environment accepted it is `accepted`
    reward: float  # the environment's reward for this turn
    finish_reason: str  # the engine's: "stop" or "length" (the per-turn cap or the context budget cut it)
    accepted: bool = True  # the environment understood the command and allowed it here
    executed: str = ""  # the canonical command the environment says it executed
    state_id: str | None = None  # true state the observation described, where the environment knows it
    action_start: int = 0  # index in `response_ids` of the first token of the action's body (0: unknown)
    logprobs: list[float] | None = None  # log-probability of each response token under the rollout policy
    history_cut: int = 0  # window context: turns of history left out because the prompt was too long
    weights: int = 0  # how often the engine had received new weights when this response began


@dataclass(slots=True)
class Trajectory:
    """One rollout of one task. `group` is shared by the rollouts of the same prompt and by nothing else."""

    group: str  # identity of the prompt group
    sample: int  # 0 .. G-1 within the group
    task: dict[str, Any]  # the prompt row's label, as given to `TextEnv.reset`
    steps: list[StepRecord] = field(default_factory=list)  # in time order; empty if the rollout failed at once
    end: EndReason = EndReason.DONE
    success: bool = False
    score: float | None = None  # how much of the goal was met, where the environment grades that and the episode ended
    error: str = ""  # what the environment raised, for `end.failed`

    @property
    def reward(self) -> float:
        """Undiscounted sum of the turns' rewards (the episode return)."""
        return float(sum(s.reward for s in self.steps))

    @property
    def counts(self) -> bool:
        """It says something about the policy: the environment held, and the policy generated at least one token."""
        return not self.end.failed and any(step.response_ids for step in self.steps)

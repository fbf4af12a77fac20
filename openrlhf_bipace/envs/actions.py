"""From a response's text to the command it gives, and from a command to the key that says when two actions are equal.

What comes out of responses, broken ones above all (``T`` stands for ``<think>x</think>``)::

    response                                    strict (ours, default)            verl (verl-agent's rule)
    T<action>go</action>                        go, valid                         go, valid
    <action>go</action>                         go, valid                         go, INVALID (no <think>)
    go north                    (no tags)       INVALID                           last 30 characters, INVALID
    Tgo</action>                (closing only)  INVALID                           last 30 characters, INVALID
    T<action>go                 (opening only)  INVALID                           last 30 characters, INVALID
    T</action><action>go        (reversed)      INVALID                           empty command, valid
    T<action>a</action><action>b</action>       INVALID (which one?)              a, valid
    T<action>a<action>b</action>                INVALID                           a<action>b, valid
    T<ACTION>Go</ACTION>        (upper case)    INVALID (tags are lower case)     go, valid
    <THINK>x</THINK><action>go</action>         go, valid (no <think> in it)      go, INVALID (no <think>)
    T<action>Go North</action>                  Go North, valid                   go north, valid
    T<action>go</action> 好的   (text after it)  INVALID                           go, INVALID (Chinese)
    <think>好</think><action>go</action>         go, valid (language is no error)  go, INVALID (Chinese)
    T<action>  </action>        (empty)         INVALID                           empty command, valid
    <think>x<action>go</action> (unclosed)      INVALID                           go, INVALID
    <think><action>go</action></think>          INVALID (an action in a thought)  go, valid
    x</think><action>go</action>                go, valid (the prompt opened it)  go, INVALID (no <think>)

verl's rule is that of `alfworld_projection` in github.com/langfengQ/verl-agent, rewritten. (Its WebShop rule keeps the
last 20 characters instead of 30, which are no command either way.) The environment hears the command of an invalid
response under verl's rule, and an empty one under ours.
"Chinese" is U+4E00 to U+9FFF anywhere in the response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

RULES = ("strict", "verl")
KEY_MODES = ("action_tag", "first_tokens", "env")
KEY_TOKENS = 8  # how many leading response tokens stand for a response

_OPEN, _CLOSE = "<action>", "</action>"
_CHINESE = re.compile("[\u4e00-\u9fff]")
_TRAILING = " .,;:!?…。，；：！？"
_VERL_TAIL = 30  # characters verl-agent sends to the environment when it finds no tags


@dataclass(slots=True)
class ParsedAction:
    """What a response says to do."""

    command: str  # outer white space removed; "" where strict found none
    valid: bool  # the response keeps the format (whether the environment allows the command is another matter)
    start: int  # index in the response's text of the command's first character; -1 where there is none
    reason: str = ""  # why it is not valid; "" when it is


def parse(text: str, rule: str = "strict") -> ParsedAction:
    """The command in a response's `text` (decoded, special tokens removed). ValueError for an unknown `rule`.

    strict: exactly one ``<action>…</action>``, lower-case tags, a body, only white space after it, and a ``<think>``,
    if there is one, closed before it. verl: the first opening tag to the first closing tag of the lower-cased text.
    The module's docstring tabulates what each makes of broken responses.
    """
    if rule == "strict":
        return _strict(text)
    if rule == "verl":
        return _verl(text)
    raise ValueError(f"rule: got {rule!r}, allowed: {' | '.join(RULES)}")


def _strict(text: str) -> ParsedAction:
    opens, closes = text.count(_OPEN), text.count(_CLOSE)
    if opens == 0 and closes == 0:
        return _invalid("no <action> tag")
    if opens != 1 or closes != 1:
        return _invalid(f"{opens} <action> and {closes} </action> tags, expected one of each")
    tag, end = text.find(_OPEN), text.find(_CLOSE)
    begin = tag + len(_OPEN)
    if end < begin:
        return _invalid("</action> comes before <action>")
    if text[end + len(_CLOSE) :].strip():
        return _invalid("text after </action>")
    think = text.rfind("<think>")
    if think != -1 and not think < text.find("</think>", think) < tag:
        return _invalid("<think> is not closed before the action")
    body = text[begin:end]
    if not body.strip():
        return _invalid("empty action")
    return ParsedAction(body.strip(), True, begin + len(body) - len(body.lstrip()))


def _verl(text: str) -> ParsedAction:
    lowered = text.lower()
    tag, end = lowered.find(_OPEN), lowered.find(_CLOSE)
    if tag == -1 or end == -1:
        return ParsedAction(lowered[-_VERL_TAIL:], False, -1, "no <action>...</action>")
    begin = tag + len(_OPEN)
    body = lowered[begin:end]  # empty when the closing tag comes first: verl-agent counts that as valid
    command = body.strip()
    start = _index_before_lowering(text, begin + len(body) - len(body.lstrip())) if command else -1
    reason = ""
    if "<think>" not in text or "</think>" not in text:
        reason = "no <think>...</think>"
    elif _CHINESE.search(text):
        reason = "Chinese characters"
    return ParsedAction(command, not reason, start, reason)


def _index_before_lowering(text: str, index: int) -> int:
    """Where character `index` of ``text.lower()`` stands in `text`; a few characters (İ) grow when lower-cased."""
    if len(text.lower()) == len(text):
        return index
    length = 0
    for i, character in enumerate(text):
        if length >= index:
            return i
        length += len(character.lower())
    return len(text)


def _invalid(reason: str) -> ParsedAction:
    return ParsedAction("", False, -1, reason)


def normalise(command: str) -> str:
    """`command` in lower case, white space folded to single spaces, trailing punctuation dropped."""
    return " ".join(command.lower().split()).rstrip(_TRAILING)


def action_key(parsed_command: str, response_ids: Sequence[int], valid: bool, executed: str, mode: str) -> str:
    """The string that is equal for two turns exactly when they took the same action (ESTIMATORS, section 5).

    `valid` says that the response parsed, `executed` is the environment's canonical command ("" if it refused).
    Modes: ``action_tag`` the normalised command; ``first_tokens`` the first 8 of `response_ids`; ``env`` `executed`.
    A response that did not parse, a command that is empty once normalised and, in mode env, a command that was refused
    get ``invalid:`` and the first 8 token ids, so that two different failures are two actions.
    ValueError for an unknown `mode`.
    """
    if mode not in KEY_MODES:
        raise ValueError(f"action_key mode: got {mode!r}, allowed: {' | '.join(KEY_MODES)}")
    tokens = ",".join(str(int(i)) for i in response_ids[:KEY_TOKENS])
    if not valid:
        return f"invalid:{tokens}"
    if mode == "first_tokens":
        return f"tokens:{tokens}"
    return (executed if mode == "env" else normalise(parsed_command)) or f"invalid:{tokens}"

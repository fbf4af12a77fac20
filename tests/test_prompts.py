"""The user messages, read as a model reads them."""

import pytest

from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs.prompts import TEMPLATES, first_user, next_user

COMMON = {"instructions": "Say go.", "admissible": ["go a", "go b"], "max_turns": 7}


def test_react_first_message_in_full():
    text = first_user("reach b.", "You are in a.", template="react", show_admissible=True, **COMMON)
    assert text == (
        "You are an agent in a text environment. Each turn you give one command and read what it leads to. "
        "You have at most 7 turns.\n\n"
        "Your task: reach b.\n\n"
        "Say go.\n\n"
        "Answer every turn in this format: first reason step by step about the situation inside <think> </think>, "
        "then give exactly one command inside <action> </action>, and write nothing after it.\n\n"
        "Observation:\nYou are in a.\n\nAdmissible commands: go a; go b"
    )


def test_terse_gives_the_essentials_only():
    assert first_user("reach b.", "You are in a.", template="terse", show_admissible=False, **COMMON) == (
        "You are in a.\ntask : reach b."
    )
    later = next_user("reach b.", "You are in b.", admissible=["go a"], show_admissible=False, template="terse")
    assert later == "You are in b.\ntask : reach b."


def test_commands_are_listed_only_when_asked_for_and_known():
    for template in ("react", "terse"):
        shown = next_user("t", "Here.", admissible=["go a", "go b"], show_admissible=True, template=template)
        assert "go a" in shown and "go b" in shown
        hidden = next_user("t", "Here.", admissible=["go a"], show_admissible=False, template=template)
        unknown = next_user("t", "Here.", admissible=[], show_admissible=True, template=template)
        assert hidden == unknown and "go a" not in hidden


def test_empty_parts_leave_no_gap_and_odd_characters_pass():
    text = first_user(
        "{x} $y %s", "{z}", instructions="", template="react", admissible=[], show_admissible=True, max_turns=0
    )
    assert "{x} $y %s" in text and text.endswith("Observation:\n{z}")
    assert "\n\n\n" not in text and "at most" not in text


def test_unknown_template_is_named():
    with pytest.raises(ValueError, match="template: got 'xml', allowed: react | terse"):
        first_user("t", "o", template="xml", show_admissible=False, **COMMON)
    with pytest.raises(ValueError, match="'xml'"):
        next_user("t", "o", admissible=[], show_admissible=False, template="xml")


def test_the_flag_offers_exactly_these_templates():
    assert AgentConfig.__dataclass_fields__["template"].metadata["choices"] == list(TEMPLATES)

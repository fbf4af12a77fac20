"""The user messages, read as a model reads them."""

import pytest

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs.prompts import FOLDER, TEMPLATES, commands_text, first_user, next_user, window_user

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


def window(template="react", turn=3, observation="You are in c.", **options):
    history = [("You are in a.", "go b"), ("You are in {b}.", "go c")][-turn:] if turn else []
    options = {"show_admissible": True, "history": history, **COMMON, **options}
    return window_user("reach d.", observation, turn=turn, template=template, **options)


def test_a_windowed_message_in_full():
    first = first_user("reach d.", "Here.", template="react", show_admissible=False, **COMMON)
    assert window() == first.removesuffix("Observation:\nHere.") + (
        "You have taken 3 turns so far; the last 2:\n"
        "[Observation 2: 'You are in a.', Action 2: 'go b']\n"
        "[Observation 3: 'You are in {b}.', Action 3: 'go c']\n\n"
        "This is turn 4.\n"
        "Observation:\nYou are in c.\n\nAdmissible commands: go a; go b"
    )
    assert window("terse") == (
        "before : You are in a. > go b\nbefore : You are in {b}. > go c\n"
        "You are in c.\ncommands : go a ; go b\ntask : reach d."
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_window_without_a_past_is_the_first_message(template):
    first = first_user("reach d.", "You are in c.", template=template, show_admissible=True, **COMMON)
    assert window(template, turn=0) == first


def test_more_history_than_turns_is_named():
    with pytest.raises(ValueError, match="history: got 2 turns, allowed after 1: at most 1"):
        window(turn=1, history=[("a", "b"), ("c", "d")])


def test_every_template_has_its_three_files_and_every_environment_its_commands():
    for template in TEMPLATES:
        assert {"first.jinja", "next.jinja", "window.jinja"} <= {path.name for path in (FOLDER / template).iterdir()}
    for path in (FOLDER / "commands").iterdir():
        assert envs.env_class(path.stem).instructions == commands_text(path.stem) != ""
    assert {"alfworld", "textcraft", "webshop"} <= {path.stem for path in (FOLDER / "commands").iterdir()}

"""Thoughts split off an answer."""

import pytest

from gateway.reasoning import Markers, ThoughtSplitter, markers_of

THINK = Markers("<think>", "</think>")

CASES = [
    pytest.param("<think>\na < b\n</think>\n\nYes </think>.", False, "a < b", "Yes </think>.", id="both"),
    pytest.param("a </thin b\n</think>\nYes", True, "a </thin b", "Yes", id="opened-by-the-prompt"),
    pytest.param("<think>\na</think>Yes", True, "a", "Yes", id="opened-twice"),
    pytest.param("\n</think>\n\nYes", True, "", "Yes", id="no-thoughts"),
    pytest.param("<think>\n\n</think>\n\n Yes ", False, "", "Yes ", id="empty-thoughts"),
    pytest.param(" \nYes <think>no</think>", False, "", " \nYes <think>no</think>", id="none"),
    pytest.param("<thin air", False, "", "<thin air", id="nearly"),
    pytest.param("<think>a \n", False, "a \n", "", id="cut-in-the-thoughts"),
    pytest.param("a </thi", True, "a </thi", "", id="cut-in-the-closer"),
    pytest.param(" <thi", False, "", " <thi", id="cut-in-the-opener"),
    pytest.param(" <thi", True, " <thi", "", id="cut-in-the-second-opener"),
    pytest.param("<think>a</think>", False, "a", "", id="thoughts-alone"),
    pytest.param("<think>a</think> \n", False, "a", "", id="thoughts-and-space"),
    pytest.param("", True, "", "", id="empty"),
]


def split(*texts: str, is_open: bool) -> tuple[str, str]:
    splitter = ThoughtSplitter(THINK, is_open=is_open)
    parts = [splitter.push(text) for text in texts] + [splitter.finish()]
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(("text", "is_open", "thoughts", "answer"), CASES)
def test_thoughts(text: str, is_open: bool, thoughts: str, answer: str) -> None:
    assert split(text, is_open=is_open) == (thoughts, answer)
    assert split(*text, is_open=is_open) == (thoughts, answer)
    for place in range(1, len(text)):
        assert split(text[:place], text[place:], is_open=is_open) == (thoughts, answer)


def test_thoughts_are_told_while_they_are_thought() -> None:
    splitter = ThoughtSplitter(THINK, is_open=False)
    assert splitter.push("<think>\n") == ("", "")
    assert splitter.push("a ") == ("a", "")
    assert splitter.push("b</") == (" b", "")
    assert splitter.push("think>\n") == ("", "")
    assert splitter.push("Yes\n") == ("", "Yes\n")


@pytest.mark.parametrize("is_open", [False, True])
def test_white_space_is_not_held_back_for_ever(is_open: bool) -> None:
    splitter = ThoughtSplitter(THINK, is_open=is_open)
    thoughts, answer = splitter.push("\n" * 1000)
    assert (thoughts, len(answer)) == ("", 0 if is_open else 1000)
    assert splitter.push("x" + "\n" * 1000)[0].startswith("x\n") == is_open


@pytest.mark.parametrize(
    ("template", "tokens", "markers"),
    [
        ("{% if '</think>' in content %}", frozenset[str](), THINK),
        ("", frozenset({"<think>", "</think>", "<tool_call>"}), THINK),
        ("", frozenset({"<think>"}), None),
        ("", frozenset({"[THINK]", "[/THINK]"}), Markers("[THINK]", "[/THINK]")),
        ("{{ messages }}", frozenset[str](), None),
    ],
)
def test_whether_a_model_thinks(template: str, tokens: frozenset[str], markers: Markers | None) -> None:
    assert markers_of(template, tokens) == markers

"""`check`: right is right, wrong gets a hint, and no prediction whatever raises."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim.questions import check


@pytest.mark.parametrize(
    ("predicted", "actual"),
    [
        (4, 4),
        (4.0, np.int64(4)),
        (0.368, np.exp(-1.0)),
        (0.368, np.float32(np.exp(-1.0))),
        (float("-inf"), -np.inf),
        (np.nan, np.nan),
        (0, 1e-17),
        (True, np.bool_(True)),
        ("Standard ", "standard"),
        ([0.237, 0.0871, 0.644, 0.0321], np.array([0.23688, 0.08714, 0.64391, 0.03206])),
        ((1, 2), [1, 2]),
        ([True, False], np.array([True, False])),
        ([], np.array([])),
    ],
)
def test_right_predictions_are_right(predicted, actual):
    verdict = check(predicted, actual, because="so it is.")
    assert verdict
    assert str(verdict).startswith("Right.\nThe answer is ")
    assert str(verdict).endswith(": so it is.")
    assert "<details>" not in verdict._repr_html_()


@pytest.mark.parametrize(
    ("predicted", "actual", "clue"),
    [
        (0.38, np.exp(-1.0), "you predicted 0.38. Too large. Look again."),
        (0.36, np.exp(-1.0), "you predicted 0.36. Too small. Look again."),
        (3, 4, "you predicted 3. Too small. Look again."),
        (4.001, 4, "Too large."),
        (np.inf, 1.0, "you predicted inf. Too large."),
        (np.nan, 1.0, "you predicted nan. Look again."),
        (False, True, "you predicted False. Look again."),
        ("flash1", "flash2", "you predicted flash1. Look again."),
        ([1, 2, 4], np.array([1, 2, 3]), "you predicted [1, 2, 4]. 2 of 3 are right. Look again."),
        ([True, True], np.array([True, False]), "1 of 2 are right."),
    ],
)
def test_wrong_predictions_get_a_hint_before_the_answer(predicted, actual, clue):
    verdict = check(predicted, actual, hint="Look again.", because="so it is.")
    assert not verdict
    said, answer = str(verdict).split("\n")
    assert said.startswith("Not what comes out: ")
    assert clue in said
    assert answer.endswith(": so it is.")
    page = verdict._repr_html_()
    assert page.index(clue) < page.index("<details>") < page.index("The answer is")


@pytest.mark.parametrize("nothing", [None, ...])
def test_without_a_prediction_the_answer_stays_hidden(nothing):
    verdict = check(nothing, 5.25)
    assert not verdict
    assert "No prediction yet" in str(verdict)
    assert "5.25" not in str(verdict) + verdict._repr_html_()


@pytest.mark.parametrize(
    ("predicted", "actual", "wanted"),
    [
        ("4", 4, "Expected a number, not '4' (str)"),
        (True, 4, "Expected a number, not True (bool)"),
        (1 + 2j, 4, "Expected a number, not (1+2j) (complex)"),
        ([4], 4, "Expected a number, not [4] (list)"),
        (1, True, "Expected True or False, not 1 (int)"),
        (4, "flash2", "Expected text, not 4 (int)"),
        ([1, 2], np.zeros(3), "Expected a list of 3, each a number, not [1, 2] (list)"),
        ([[1], [2, 3]], np.zeros(2), "Expected a list of 2, each a number"),
        ({1}, np.zeros(2), "Expected a list of 2, each a number, not {1} (set)"),
        ([1, 0], np.array([True, False]), "Expected a list of 2, each True or False"),
        (1, np.zeros((2, 3)), "Expected 2 x 3 values, each a number"),
    ],
)
def test_an_unusable_prediction_is_answered_in_words_and_reveals_nothing(predicted, actual, wanted):
    verdict = check(predicted, actual, because="a secret.")
    assert not verdict
    assert wanted in str(verdict)
    assert "secret" not in str(verdict)


def test_fractions_and_long_integers_are_numbers():
    assert check(Fraction(1, 4), 0.25)
    assert check([Fraction(1, 4), 1], np.array([0.25, 1]))
    assert check(10**30, 1e30)
    assert "Expected a number" in str(check(10**400, 1e30))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(anything, st.floats() | st.integers(0, 9) | st.booleans() | st.lists(st.floats()))
def test_no_prediction_raises(predicted, actual):
    verdict = check(predicted, actual)
    assert str(verdict)
    assert verdict._repr_html_()


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 0.5))
def test_the_tolerance_is_relative(actual, tolerance):
    assert check(actual * (1 + 0.9 * tolerance), actual, tolerance=tolerance)
    if abs(actual) > 1e-3:
        assert not check(actual * (1 + 1.1 * tolerance), actual, tolerance=tolerance)


def test_a_page_shows_text_as_it_is():
    page = check("<b>", "a", hint="x < y", because="a < b")._repr_html_()
    assert "&lt;b&gt;" in page
    assert "x &lt; y" in page
    assert "a &lt; b" in page

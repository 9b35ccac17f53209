"""A gain is called one of format only where strict accuracy rose more than lenient did, beyond chance."""

import pytest

from grpo_portable.scores import verdict


def scores(lenient_delta, lenient_verdict, format_interval):
    strict = {"verdict": "higher", "base": 0.054, "tuned": 0.070, "n": 1319, "delta": 0.016, "interval": [0.001, 0.031]}
    strict |= {"p": 0.044, "smallest_detectable": 0.021}
    lenient = {"verdict": lenient_verdict, "delta": lenient_delta, "p": 0.057}
    gain = {"delta": 0.016 - lenient_delta, "interval": format_interval}
    return {"stages": {"base": {}}, "against": "bootstrap", "strict": strict, "lenient": lenient, "format_gain": gain}


@pytest.mark.parametrize(
    ("case", "says", "never"),
    [
        (scores(0.015, "not shown to differ", [-0.002, 0.004]), "small", "format"),
        (scores(0.001, "not shown to differ", [0.008, 0.022]), "one of format", "small"),
        (scores(-0.02, "lower", [-0.002, 0.05]), "one of format", "small"),
        (scores(0.016, "higher", [-0.002, 0.002]), "the gain is beyond the noise of these questions.", "but"),
    ],
)
def test_what_the_sentence_says_of_lenient_accuracy(case, says, never):
    text = verdict.sentence(case)
    assert says in text and never not in text


@pytest.mark.parametrize(
    ("against", "says"),
    [
        ("base", "GRPO left strict accuracy at 5.4 % on 1,319 questions (+0.0 points"),
        ("bootstrap", "GRPO left strict accuracy at 5.4 %, as after the bootstrap, on 1,319 questions (+0.0 points"),
    ],
)
def test_what_did_not_move_is_not_said_to_have_moved(against, says):
    case = scores(0.0, "not shown to differ", [0.0, 0.0])
    still = {"verdict": "not shown to differ", "tuned": 0.054, "delta": 0.0, "interval": [-0.01, 0.01], "p": 1.0}
    assert verdict.sentence({**case, "against": against, "strict": case["strict"] | still}).startswith(says)


def test_the_warning_gives_both_deltas():
    (warning,) = verdict.warnings(scores(0.015, "not shown to differ", [-0.002, 0.004]))
    assert "+1.6" in warning["message"] and "+1.5" in warning["message"] and "do not differ" in warning["message"]

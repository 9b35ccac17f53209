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


def test_the_warning_gives_both_deltas():
    (warning,) = verdict.warnings(scores(0.015, "not shown to differ", [-0.002, 0.004]))
    assert "+1.6" in warning["message"] and "+1.5" in warning["message"] and "do not differ" in warning["message"]

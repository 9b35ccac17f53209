"""What a user is told reads as one sentence, whoever wrote its parts."""

import pickle

import pytest

from grpo_portable.errors import EngineError, PathClosed, brief, clause, wrapped


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("No file\n  of that name.", "No file of that name."),
        ("It needs a file. It has none of those that are known to it.", "It needs a file."),
        ("It needs a file of those that are known to it", "It needs a file of those that ..."),
        ("x" * 50, "x" * 31 + "..."),
    ],
)
def test_a_long_text_is_cut_between_sentences_or_words(text, told):
    assert brief(text, 35) == told and len(told) <= 35


@pytest.mark.parametrize(
    ("sentence", "as_clause"),
    [
        ("This machine has no GPU that torch could use", "this machine has no GPU that torch could use"),
        ("The driver is too old.", "the driver is too old"),
        ("A package is missing", "a package is missing"),
        ("Can't load it", "can't load it"),
        ("[Errno 2] No such file or directory: 'x.json'", "no such file or directory: 'x.json'"),
        ("[Errno 13] Permission denied: 'x.json'", "permission denied: 'x.json'"),
        ("Expecting value: line 1 column 1 (char 0)", "Expecting value: line 1 column 1 (char 0)"),
        ("Kaggle keeps nothing", "Kaggle keeps nothing"),
        ("Hugging Face says no", "Hugging Face says no"),
        ("A100 cards have no FP8", "A100 cards have no FP8"),
        ("With the helps followed it could take fp8-vllm", "with the helps followed it could take fp8-vllm"),
        ("vLLM is not installed", "vLLM is not installed"),
        ("CUDA out of memory.", "CUDA out of memory"),
        ("KeyError: 'x'", "KeyError: 'x'"),
        ("Error: it broke", "Error: it broke"),
        ("Tesla T4 has compute capability 7.5", "Tesla T4 has compute capability 7.5"),
        ("Pascal cards have no bfloat16", "Pascal cards have no bfloat16"),
        ("Unsloth imports bitsandbytes", "Unsloth imports bitsandbytes"),
        ("GeForce RTX 5090 needs CUDA 12.9", "GeForce RTX 5090 needs CUDA 12.9"),
        ("docker run --gpus all ...", "docker run --gpus all ..."),
        ("", ""),
    ],
)
def test_a_sentence_becomes_a_clause_once(sentence, as_clause):
    assert clause(sentence) == as_clause
    assert clause(as_clause) == as_clause


def test_an_error_is_one_sentence():
    error = PathClosed("path fp8-vllm is closed on this machine.", because="This machine has no GPU.", help="Add one.")
    assert error.lines() == [
        "error: path fp8-vllm is closed on this machine, because this machine has no GPU",
        "help: Add one.",
    ]
    assert str(EngineError("it ended", because="")) == "it ended"


def test_an_error_comes_whole_out_of_another_process():
    error = pickle.loads(pickle.dumps(EngineError("it ended", because="Nobody knows.", help="look")))
    assert (error.fact, error.because, error.help) == ("it ended", "nobody knows", "look")


WORDS = "what was made so far is kept, and nothing more could be written"
COMMAND = "grpo-portable train --resume --out " + "a" * 60


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"help: {WORDS}", ["help: what was made so far is kept, and nothing more could", "  be written"]),
        (f"help: go on with: {COMMAND}", ["help: go on with:", f"  {COMMAND}"]),
        (
            f"help: `{COMMAND}` (it saves first), then wait",
            ["help:", f"  `{COMMAND}`", "  (it saves first), then wait"],
        ),
        (f"go on with: {COMMAND}; else begin", ["go on with:", f"  {COMMAND};", "  else begin"]),
        ("    help: short", ["    help: short"]),
    ],
)
def test_a_sentence_is_wrapped_and_a_command_in_it_never_broken(text, lines):
    found = wrapped(text, "  ", 60)
    assert found == lines


def test_an_error_is_as_wide_as_the_terminal_and_at_most_80(monkeypatch):
    error = PathClosed(WORDS, because=WORDS, help=WORDS)
    for columns, most in ((200, 80), (50, 50)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert most - 15 < max(map(len, error.shown())) <= most

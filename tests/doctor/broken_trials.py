"""Trials that end in every bad way, run by test_child.py in child interpreters."""

import os
import signal
import subprocess
import sys
import time

from doctor.trials import stage, tell


def good(word="hello"):
    stage("only")
    print("noise on stdout")
    tell("word", word)


def raises():
    tell("before", 1)
    try:
        raise OSError("libcudart.so.13: cannot open shared object file")
    except OSError as e:
        raise RuntimeError("could not import module 'X'\n\nfor a reason") from e


def raises_after_swallowing():
    try:
        import not_a_package_anywhere  # noqa: F401
    except ImportError:
        raise ValueError("no backend") from None


def points_above():
    print("ERROR 11-29 core.py: RuntimeError: the real cause", flush=True)
    print("Traceback noise", flush=True)
    raise RuntimeError("Engine core initialization failed. See root cause above.")


def segfault():
    stage("native code")
    print("about to touch /home/somebody/secret", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves():
    print("undefined symbol: _ZN3c10", flush=True)
    os._exit(7)


def hangs():
    stage("CUDA start")
    tell("before", 1)
    time.sleep(600)


def hangs_in_sight(pid_file):
    with open(pid_file, "w") as f:
        f.write(str(os.getpid()))
    time.sleep(600)


def slow_import():
    stage("import torch")
    time.sleep(600)


def gets_on():
    for i in range(6):
        stage(f"step {i}")
        time.sleep(0.35)
    tell("done", True)


def leaves_a_child(pid_file):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(pid_file, "w") as f:
        f.write(str(process.pid))
    tell("done", True)


def where():
    tell("cwd", os.listdir("."))
    tell("path", sys.path)
    tell("offline", os.environ.get("HF_HUB_OFFLINE"))
    tell("extra", os.environ.get("EXTRA"))

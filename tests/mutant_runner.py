"""A warm process that runs tests of a copy of the tree, each request in a fork of itself.

It has imported JAX and pytest but nothing of this project, and has started no backend, so a fork costs milliseconds.
Requests and answers are JSON, one a line: {"folder", "tests", "marks", "seconds", "record"} -> {"code",
"seconds", "red": the test that was red, if one was}.
"""

import importlib
import json
import os
import resource
import signal
import sys
import time

PRELOADED = ("jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "hypothesis", "pytest", "tyro", "rich.table")
MEMORY = 14 * 2**30  # of address space: a mutant may ask for any amount
TIMED_OUT = 124


class Recorder:
    """A pytest plugin: which lines of the folder's `jaxdist` each test runs, and how long it takes."""

    def __init__(self, folder: str, path: str):
        self.prefix, self.path, self.lines = os.path.join(folder, "jaxdist", ""), path, set()

    def pytest_runtest_protocol(self, item, nextitem):
        self.lines, self.start = set(), time.monotonic()
        sys.settrace(self.on_call)

    def pytest_runtest_logfinish(self, nodeid, location):
        sys.settrace(None)
        files: dict[str, list[int]] = {}
        for name, line in sorted(self.lines):
            files.setdefault("jaxdist/" + name.removeprefix(self.prefix), []).append(line)
        with open(self.path, "a", encoding="utf-8") as out:
            row = {"test": nodeid, "seconds": round(time.monotonic() - self.start, 3), "lines": files}
            out.write(json.dumps(row) + "\n")

    def on_call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.prefix):
            return None
        return self.on_line(frame, event, arg)

    def on_line(self, frame, event, arg):
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.on_line


class FirstRed:
    """A pytest plugin: writes the name of the test that is red to a pipe."""

    def __init__(self, pipe: int):
        self.pipe = pipe

    def pytest_runtest_logreport(self, report):
        if report.failed:
            os.write(self.pipe, report.nodeid.encode())


def run_tests(folder: str, tests: list[str], marks: str, record: str | None, pipe: int) -> int:
    """pytest's exit code, or 1 for whatever else ends it. In a fork: it changes the process for good."""
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder  # of programs that tests start
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    options = ["-q", "-o", "addopts=", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    if record is None:
        return int(pytest.main([*options, "-x", *tests], plugins=[FirstRed(pipe)]))
    return int(pytest.main([*options, *tests], plugins=[Recorder(folder, record)]))


def answer(request: dict) -> dict:
    start = time.monotonic()
    red, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run_tests(request["folder"], request["tests"], request["marks"], request["record"], pipe)
        finally:
            os._exit(code)
    os.close(pipe)
    with os.fdopen(red, "rb") as told:
        os.set_blocking(red, False)  # a program that a test started may hold the other end
        code, seconds = wait(child, start, request["seconds"])
        return {"code": code, "seconds": seconds, "red": (told.read() or b"").decode()}


def wait(child: int, start: float, limit: float) -> tuple[int, float]:
    """(exit code, seconds since `start`) of a child, which is killed at the limit."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - start
        if done:
            return os.waitstatus_to_exitcode(status), seconds
        if seconds > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TIMED_OUT, seconds
        time.sleep(0.05)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

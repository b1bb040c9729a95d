"""Ctrl-C and other signals reach a program wherever it is."""

import errno
import os
import queue
import signal
import time
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from experiments import train_setup
from experiments.entry import SafeConsole
from jaxdist.runtime.signals import Interrupts, Signals, use_default_sigint


@pytest.fixture
def as_python_has_it():
    """Also where the tests were started with nohup, or in the background."""
    of_a_shell = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in of_a_shell.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interrupt_that_is_dropped_comes_again(as_python_has_it, monkeypatch):
    monkeypatch.setattr(Interrupts, "AGAIN_SECONDS", 0.01)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        with suppress(KeyboardInterrupt):  # as a callback of the garbage collector does
            signal.raise_signal(signal.SIGINT)
        time.sleep(20)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_was_ignored_stays_ignored(as_python_has_it):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_default_sigint()
    with Interrupts():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_of_what_is_imported_ends_the_process(as_python_has_it):
    use_default_sigint()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_the_first_signal_is_heard_where_the_job_does_not_look():
    heard = queue.Queue()
    with Signals((signal.SIGUSR1,), heard=heard.put) as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert heard.get(timeout=20) == "SIGUSR1" and signals.number == signal.SIGUSR1


def test_a_closed_terminal_asks_to_stop_though_it_signals_twice_and_takes_no_text(as_python_has_it):
    gone, asked = OSError(errno.EIO, "Input/output error"), []
    console = SafeConsole(file=SimpleNamespace(write=Mock(side_effect=gone), isatty=lambda: False))
    console.when_broken = lambda: asked.append("stop")
    with Signals(heard=Mock(side_effect=gone)) as signals:
        for _ in range(2):  # the kernel's, and the shell's
            signal.raise_signal(signal.SIGHUP)
        console.print("a step")
    assert signals.number == signal.SIGHUP and asked == ["stop"] and console.quiet


def test_a_job_that_is_late_ends_though_nobody_reads_that(monkeypatch):
    monkeypatch.setattr(os, "_exit", Mock())
    Signals(late=Mock(side_effect=BrokenPipeError))._end(signal.SIGTERM)
    os._exit.assert_called_once_with(143)


def test_work_that_ends_as_nobody_waits_for_it_is_done(monkeypatch):
    class Late(Future):
        def result(self, timeout=None):
            found = super().result()
            if timeout is not None:  # the time is over, and a moment later the work is done
                raise TimeoutError
            return found

    monkeypatch.setattr(train_setup, "Future", Late)
    run = SimpleNamespace(signals=SimpleNamespace(number=None))
    assert train_setup.interruptible(run, 0, lambda: "compiled") == "compiled"

"""A process that answers lines: how another framework is measured in turn with JAX without sharing its threads or card.

It is started as `python -m MODULE JSON` and answers a line of its input with a line of JSON. While it waits for a line
it uses no core.
"""

import json
import os
import subprocess
import sys
import tempfile

from jaxdist.commands import import_root


class WorkerEnded(Exception):
    """The process is gone; the text is the last line it wrote."""


class Worker:
    def __init__(self, module: str, asked: dict):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(import_root()), os.environ.get("PYTHONPATH", "")])},
        )

    def send(self, line: str) -> None:
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # whoever reads the answer learns why

    def answer(self) -> dict:
        """The next answer. Raises: WorkerEnded."""
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print, too
                return json.loads(line)
        self.close()
        self._log.seek(0)
        raise WorkerEnded((self._log.read().strip().splitlines() or ["no message"])[-1])

    def ask(self, line: str) -> dict:
        self.send(line)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

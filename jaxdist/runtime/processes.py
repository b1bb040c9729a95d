"""Several processes as one run: joining, agreeing, waiting for each other, all outside the devices.

JAX's own coordination service does the talking (`jax.distributed`), so nothing here needs a working collective.
With one process every function is trivial.
"""

import hashlib
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from jaxdist.commands import command_text
from jaxdist.compat import coordination_client, coordination_count, coordination_index
from jaxdist.errors import ConfigError, printable, reason_of

ADDRESS = "JAX_COORDINATOR_ADDRESS"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX reads it
JOIN_SECONDS = 120  # in which all processes must have come

# How launchers tell a process how many there are and which one it is.
LAUNCHERS = (
    ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),  # python -m experiments.launch
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI, 4 and 5
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # srun; a batch script itself is no step
)


def index() -> int:
    """This process's number, from 0; known before a backend starts."""
    return coordination_index()


class Shown(NamedTuple):
    """A value that is compared as one text and shown to a person as another."""

    compared: str
    text: str


class Disagreement(ConfigError):
    """What the processes of a run were given differs. Every process raises it, with the same message."""


def is_first() -> bool:
    """Whether this process is the one that speaks, writes and decides; known before a backend starts."""
    return coordination_index() == 0


def join(address: str | None, num_processes: int | None, process_id: int | None, heartbeat_seconds: int = 30) -> None:
    """Join the other processes of this run; before anything else touches a JAX backend.

    Args: what is None is read from the variables of a launcher, or found by JAX (Slurm, Open MPI 4, Kubernetes).
    heartbeat_seconds: a process that is silent for so long is dead, and all others end.
    Raises: ConfigError where they cannot be found or reached.
    """
    address = address or os.environ.get(ADDRESS)
    if address is not None:
        require_address(address)
        num_processes, process_id = from_launcher(num_processes, process_id)
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ConfigError(
            f"process {process_id} of {num_processes}",
            "processes must be numbered from 0",
            f"Use process_id=0 to {num_processes - 1}",
        )
    if None not in (address, process_id) and not _number:
        _number.append(take_number(address, process_id))
    slow = threading.Timer(JOIN_SECONDS / 4, _say_waiting, (address, num_processes, process_id))
    slow.daemon = True
    slow.start()
    import jax  # not above: a program that refuses a flag before it joins need not wait for it

    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM; jaxdist.runtime.signals does
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat_seconds,
            initialization_timeout=JOIN_SECONDS,
            shutdown_timeout_seconds=60,
            coordinator_bind_address=_bind_address(address),
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            "several processes",
            f"they cannot find each other ({reason_of(error)})",
            f"Start them with Slurm, Open MPI or Kubernetes, with {command_text('launch')}, or give "
            "coordinator=HOST:PORT, num_processes=N and process_id=I to each",
        ) from error
    finally:
        slow.cancel()
    if count() > 1:
        start_guard("other processes", _listen)


_number: list[socket.socket] = []  # held for as long as this process lives


def take_number(address: str, process_id: int) -> socket.socket | None:
    """Hold a process's number in the run at an address, on this machine; None where it has no sockets without a file.

    A second process of a number must not register: JAX would take it for the first one, restarted, and end all others.
    Raises: ConfigError where another process holds it.
    """
    if sys.platform != "linux":
        return None
    host, _, port = address.rpartition(":")
    with suppress(OSError):  # a name that is not found, which JAX will say
        address = str(socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][4][:2])
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0jaxdist/{hashlib.sha256(address.encode()).hexdigest()[:16]}/{process_id}")
    except OSError as error:
        held.close()
        required = "each must have a number of its own, and a process that runs on this machine has this one"
        raise ConfigError(f"process {process_id} at {address}", required, "Use another process_id") from error
    return held


def _bind_address(address: str | None) -> str | None:
    """Where the first process listens: on loopback alone where the address is loopback. None is JAX's choice.

    JAX listens on every interface, and whoever reaches that port can register as a process and end the run.
    """
    host = "" if address is None else address.rpartition(":")[0].strip("[]")
    local = host == "localhost" or host == "::1" or host.startswith("127.")
    return address if local and BIND_ADDRESS not in os.environ else None


def _say_waiting(address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """JAX aborts the process when the time is over, and does not say whom it waited for."""
    where = "" if address is None else f" at {address}"
    text = f"process {process_id} of {num_processes} still waits for the others{where}, until {JOIN_SECONDS} s are over"
    print(text, file=sys.stderr, flush=True)


def require_address(address: str) -> None:
    """Raises: ConfigError where it is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"coordinator={address!r}",
            "must be the host of the first process and a port that is free there",
            "Write it as in 10.0.0.1:1234",
        )


def from_launcher(num_processes: int | None, process_id: int | None) -> tuple[int | None, int | None]:
    """Fill in what is None from the first launcher whose variables are set. Raises: ConfigError."""
    for count, index in LAUNCHERS:
        if count in os.environ and index in os.environ:
            for name in (count, index):
                if not (os.environ[name].isascii() and os.environ[name].isdigit()):
                    raise ConfigError(f"{name}={os.environ[name]}", "must be a number of processes", "Start them anew")
            num_processes = int(os.environ[count]) if num_processes is None else num_processes
            process_id = int(os.environ[index]) if process_id is None else process_id
            break
    return num_processes, process_id


def require_alone() -> None:
    """Raises: ConfigError where a launcher started several processes: each would do the whole run."""
    num_processes, process_id = from_launcher(None, None)
    if (num_processes or 1) > 1:
        raise ConfigError(
            f"process {process_id} of {num_processes}",
            "it must be asked to join the others, or each would do the whole run by itself",
            "Add distributed=True under Slurm, coordinator=HOST:PORT under Open MPI, or num_processes=1 where each is "
            "a run of its own",
        )


def asked_to_join() -> bool:
    """Whether the environment names a coordinator."""
    return ADDRESS in os.environ


def count() -> int:
    """Processes of this run, whether or not a backend has started."""
    return coordination_count()


def leave(code: int) -> None:
    """End this process at once: saying goodbye would wait for processes that are gone."""
    if _ending.is_set():  # with a code of its own, by another thread
        time.sleep(2 * LISTEN_SECONDS)
    os._exit(code)


FAILED = "jaxdist/failed"
LISTEN_SECONDS = 1.0
_failing = threading.Event()
_ending = threading.Event()


def fail(code: int, others: int, reason: str) -> None:
    """End this process with exit code `code`, and within seconds all others with `others`, wherever they wait.

    What only one process finds wrong (a file it cannot read, a bug) would leave the others waiting for it.
    """
    _failing.set()
    with suppress(RuntimeError):  # another one failed before
        coordination_client().key_value_set(FAILED, f"{others} process {coordination_index()}: {reason}")
    time.sleep((3 if is_first() else 2) * LISTEN_SECONDS)  # in which the others read it
    leave(code)


def end_together(name: str, seconds: float) -> None:
    """Wait, `seconds` at most, until every process is here; each of them ends next, the first of them last."""
    if count() == 1:
        return
    _ending.set()
    with suppress(RuntimeError):  # some never came
        coordination_client().wait_at_barrier(f"jaxdist/end/{name}", int(seconds * 1000))
    if is_first():
        time.sleep(LISTEN_SECONDS)  # it serves the barrier to the others


def start_guard(name: str, target: Callable[[], None]) -> None:
    """Run `target` in a thread beside the program. Should it fail, the process ends: nobody would guard it any more."""

    def run():
        try:
            target()
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            said = f"the thread {name!r} failed, and nothing would guard this process any more"
            print(said, file=sys.__stderr__, flush=True)
            os._exit(1)

    threading.Thread(target=run, name=name, daemon=True).start()


def _listen() -> None:
    """End this process when another one has failed."""
    while not _failing.wait(LISTEN_SECONDS):
        with suppress(RuntimeError):  # there is no message
            client = coordination_client()
            if client is None:  # JAX has left the others: this process is about to end
                return
            code, _, reason = client.key_value_try_get(FAILED).partition(" ")
            if not _failing.is_set():
                text = f"process {coordination_index()} ends, since another one did. {reason}"
                print(printable(text), file=sys.stderr)
                sys.stderr.flush()
                if is_first():  # it serves the message, and JAX aborts the others once it is gone
                    time.sleep(3 * LISTEN_SECONDS)
                leave(int(code))


_COUNTER = itertools.count()


def barrier(name: str, seconds: float = 600) -> None:
    """Wait for every process. They must come here in the same order."""
    if count() > 1:
        coordination_client().wait_at_barrier(f"jaxdist/{next(_COUNTER)}/{name}", int(seconds * 1000))


def from_first(name: str, value: str, seconds: float = 600) -> str:
    """The first process's `value`, on all of them. They must come here in the same order."""
    if count() == 1:
        return value
    client, key = coordination_client(), f"jaxdist/{next(_COUNTER)}/{name}"
    if is_first():
        client.key_value_set(key, value)
        return value
    return client.blocking_key_value_get(key, int(seconds * 1000))


def from_all(name: str, value: str, seconds: float = 600) -> list[str]:
    """Every process's `value`, in the order of processes. They must come here in the same order."""
    if count() == 1:
        return [value]
    client, key = coordination_client(), f"jaxdist/{next(_COUNTER)}/{name}"
    client.key_value_set(f"{key}/{coordination_index()}", value)
    return [client.blocking_key_value_get(f"{key}/{index}", int(seconds * 1000)) for index in range(count())]


def require_agreement(name: str, values: Mapping[str, object], seconds: float = 60) -> None:
    """Compare what each process was given, before anything is traced.

    A collective that only some processes run, or run differently, hangs or computes something else without an error.
    They must come here in the same order.

    Args: values: name -> a value, compared as text, or a `Shown`.

    Raises: Disagreement, on every process, naming what differs and which processes have which value; ConfigError where
    a process does not answer within `seconds`.
    """
    if count() == 1:
        return
    mine = json.dumps({key: value if isinstance(value, Shown) else (str(value),) * 2 for key, value in values.items()})
    try:
        of_first = from_first(f"{name}: count", str(count()), seconds)
        if of_first != str(count()):  # the others cannot all be asked: they are not known alike
            raise ConfigError(
                f"process {index()} of {count()}",
                f"the first process must be one of {of_first}",
                "Start all of them anew",
            )
        everyone = [json.loads(text) for text in from_all(name, mine, seconds)]
    except RuntimeError as error:
        raise ConfigError(
            f"{count()} processes",
            f"all of them must say within {seconds:g} s what they were given ({reason_of(error)})",
            "Start all with the same command and the same version of jaxdist",
        ) from error
    differing = differences(everyone)
    if differing:
        raise Disagreement(
            f"{count()} processes of one run", "; ".join(differing), "Give every process the same, and start them anew"
        )


def differences(everyone: list[dict[str, list[str]]]) -> list[str]:
    """name -> [compared, shown] of each process -> `--lr is 0.001 on process 0 and 0.003 on process 1`, ..."""
    lines = []
    for name in dict.fromkeys(name for values in everyone for name in values):
        holders: dict[str, list[int]] = {}
        shown: dict[str, str] = {}
        for index, values in enumerate(everyone):
            compared, text = values.get(name, ["not known", "not known"])
            shown.setdefault(compared, text)
            holders.setdefault(compared, []).append(index)
        if len(holders) > 1:
            lines.append(f"{name} is " + " and ".join(f"{shown[key]} on {_named(who)}" for key, who in holders.items()))
    return lines


def _named(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:4])) + (f" and {len(indices) - 4} more" if len(indices) > 4 else "")
    return f"process{'es' * (len(indices) > 1)} {shown}"

"""Connects the processes of a run to process 0, before JAX connects them.

JAX has a key-value store for its processes, but no public API for it, and its collectives require that the processes
already agree. Process 0 therefore listens on the coordinator's port first. When all processes have connected, it leaves
the port to JAX; the connections stay open.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from .._exit_codes import MISTAKE, RETRY, of_error
from ..launch import Launch, NoCoordinator
from ._json_socket import Line, Message

# Long, because a process may be reading text from a slow file system.
_ANSWER_TIMEOUT_S = 3600.0
_RETRY_S = 0.2
_LISTEN_S = 0.2
_ITSELF_S = 10.0
_MARK = "gtp_jax"
_NOT_HERE = (
    "process 0 cannot reach itself at --coordinator {}: {}. Give an address of the host on which process 0 runs."
)


class Peers:
    """The connections between the processes of a run. A context manager: the processes connect when they enter it.

    Does nothing for a single process.

    Args:
        launch: the processes, and the time within which all of them must have come.

    Raises:
        NoCoordinator: if the processes do not find each other, or two of them have the same index.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._lines: dict[int, Line] = {}  # from process 0 to each other process, or from another one to process 0
        self._hosts: list[str] = []  # of all processes
        self._stop = threading.Event()
        self._listener: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._launch.processes > 1:
            deadline = time.monotonic() + self._launch.join_timeout_s
            if self._first:
                self._lines, self._hosts = _gather(self._launch, deadline)
            else:
                line, self._hosts = _reach(self._launch, deadline)
                self._lines = {0: line}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.tell({"bye": True} if error is None else {"failed": str(error) or repr(error), "code": of_error(error)})
        self._stop.set()
        if self._listener is not None:
            self._listener.join()
        for line in self._lines.values():
            line.close()

    @property
    def _first(self) -> bool:
        return self._launch.process == 0

    def ask(self, mine: Any, decide: Callable[[list[Any]], Any], *, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """Lets process 0 make a decision from one value per process. Every process must call this.

        Args:
            mine: the value of this process, JSON.
            decide: makes the decision, JSON, from the values of all processes in order; called in process 0.
            timeout_s: the time to wait for all other processes, in seconds.

        Returns:
            The decision.

        Raises:
            NoCoordinator: if a process has ended, or does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        if not self._first:
            self._lines[0].send({"says": mine})
            return _answers(self._lines, deadline)[0]["decided"]
        said = {0: mine} | {process: answer["says"] for process, answer in _answers(self._lines, deadline).items()}
        decision = decide([said[process] for process in range(self._launch.processes)])
        for line in self._lines.values():
            line.send({"decided": decision})
        return decision

    def together[T](self, check: Callable[[], T]) -> T:
        """Runs a check in every process, and makes all of them fail if it fails in one. Every process must call this.

        Returns:
            The result of the check in this process.

        Raises:
            ValueError: if the check failed in another process. If it failed in this one, its own error is raised.
        """
        refusal: Exception | None = None
        result: Any = None
        try:
            result = check()
        except (ValueError, OSError, ModuleNotFoundError) as error:
            refusal = error
        refused = self.ask(refusal is not None, lambda every: [p for p, refuses in enumerate(every) if refuses])
        if refusal is not None:
            raise refusal
        if refused:
            raise ValueError(f"{several('process', refused)} refused to start; its own output says why.")
        return result

    def tell(self, message: Message, process: int | None = None) -> None:
        """Sends a message to one process, or to all to which this one is connected. May be called from any thread."""
        for number, line in self._lines.items():
            if process is None or number == process:
                line.send(message)

    def named(self, processes: Sequence[int]) -> str:
        """Returns processes for messages, such as `process 3`; of a run on several hosts, with the name of each host,
        such as `process 3 on node7`."""
        several_hosts = len(set(self._hosts)) > 1
        return several("process", [f"{p} on {self._hosts[p]}" if several_hosts else p for p in processes])

    @property
    def connected(self) -> list[int]:
        """The processes to which this one is connected: all others for process 0, otherwise process 0."""
        return sorted(self._lines)

    def listen(self, *hearers: Callable[[int, Message | None], None]) -> None:
        """Starts a thread that passes on the messages of other processes. From now on, `ask` must not be called.

        Args:
            hearers: functions of the process and its message, which is `None` if the process is gone.
        """
        if self._lines:
            self._listener = threading.Thread(target=self._hear, args=(hearers,), name="peers", daemon=True)
            self._listener.start()

    def _hear(self, hearers: Sequence[Callable[[int, Message | None], None]]) -> None:
        with selectors.DefaultSelector() as selector:
            for process, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, process)
                for message in line.unread:
                    for heard in hearers:
                        heard(process, message)
            while not self._stop.is_set() and selector.get_map():
                for key, _ in selector.select(_LISTEN_S):
                    line: Any = key.fileobj
                    messages = line.receive()
                    if messages is None:
                        selector.unregister(line)
                    for message in [None] if messages is None else messages:
                        for heard in hearers:
                            heard(key.data, message)


def several(noun: str, numbers: Sequence[int | str], *, most: int = 8) -> str:
    """Returns numbers with their noun, for messages, such as `processes 1, 2 and 5 more`."""
    listed = ", ".join(str(number) for number in numbers[:most])
    plural = noun if len(numbers) == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{plural} {listed}" + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def _gather(launch: Launch, deadline: float) -> tuple[dict[int, Line], list[str]]:
    """Returns the connections from process 0 to all other processes, and the hosts of all.

    Raises:
        NoCoordinator: if the port is taken, the address is not this host's, the processes disagree about their number
            or indices, or not all have come in time.
    """
    who: dict[int, Message] = {}
    lines: dict[int, Line] = {}
    with _listen(launch) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        waiting: list[Line] = []
        try:
            own = _connect_to_itself(launch, deadline)  # proves that the address is this host's
            while len(who) < launch.processes:
                limit = deadline if 0 in who else min(deadline, time.monotonic() + _ITSELF_S)
                ready = selector.select(max(0.0, limit - time.monotonic()))
                if not ready and 0 not in who:
                    raise NoCoordinator(_NOT_HERE.format(launch.coordinator, "another host answers"))
                if not ready:
                    missing = [process for process in range(launch.processes) if process not in who]
                    who_not = several("process", missing)
                    raise _too_late(f"{who_not} did not reach process 0 at {launch.coordinator}", launch)
                for key, _ in ready:
                    if key.fileobj is listener:
                        waiting.append(Line(_prepared(listener.accept()[0])))
                        selector.register(waiting[-1], selectors.EVENT_READ)
                        continue
                    line: Any = key.fileobj
                    messages = line.receive()
                    if messages == []:
                        continue
                    selector.unregister(line)
                    if messages is None or messages[0].get("program") != _MARK:  # not a process of a run
                        waiting.remove(line)
                        line.close()
                        continue
                    [hello, *_] = messages
                    if trouble := _misfit(launch, who, hello, own):
                        raise _with_code(trouble, MISTAKE)
                    who[hello["process"]] = hello
                    lines[hello["process"]] = line
                    waiting.remove(line)
        except NoCoordinator as error:
            for line in [*lines.values(), *waiting]:
                line.send({"refused": str(error), "code": error.exit_code})
                line.close()
            raise
    for line in [lines.pop(0), *waiting]:
        line.close()
    hosts = [str(who[process].get("host")) for process in range(launch.processes)]
    for line in lines.values():
        line.send({"welcome": True, "hosts": hosts})
    return lines, hosts


def _reach(launch: Launch, deadline: float) -> tuple[Line, list[str]]:
    """Returns a connection to process 0, and the hosts of all processes.

    Raises:
        NoCoordinator: if process 0 refuses, another program answers, or nothing answers in time.
    """
    trouble: object = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(_address(launch), timeout=min(left, 5.0))
        except OSError as error:
            trouble = error
            time.sleep(_RETRY_S)
            continue
        line = Line(_prepared(connection))
        line.send(_hello(launch))
        try:
            [answer] = _answers({0: line}, deadline + _ITSELF_S).values()  # names processes that have not come
        except NoCoordinator:
            line.close()
            raise NoCoordinator(
                f"the program that listens at {launch.coordinator} is not process 0 of a run that waits for process "
                f"{launch.process} of {launch.processes}. Either another program uses the port, the run is already "
                "complete because another process has this --process-id, or process 0 has just ended."
            ) from None
        if "refused" in answer:
            line.close()
            raise _with_code(str(answer["refused"]), int(answer["code"]))
        return line, answer["hosts"]
    who = f"process {launch.process} of {launch.processes}"
    raise _too_late(f"{who} found no coordinator, process 0, at {launch.coordinator} ({trouble})", launch)


def _too_late(text: str, launch: Launch) -> NoCoordinator:
    return NoCoordinator(
        f"{text} within {launch.join_timeout_s:g} s. Start all processes with the same --coordinator, the address of "
        "process 0 and a free port. If they do not start within that time, give all of them a longer --join-timeout."
    )


def _answers(lines: dict[int, Line], deadline: float) -> dict[int, Message]:
    """Returns the next message of each connection.

    Raises:
        NoCoordinator: if a process ends, or does not answer in time.
    """
    answers: dict[int, Message] = {}
    with selectors.DefaultSelector() as selector:
        for process, line in lines.items():
            if line.unread:
                answers[process] = line.unread.pop(0)
            else:
                selector.register(line, selectors.EVENT_READ, process)
        while len(answers) < len(lines):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise NoCoordinator(f"{several('process', sorted(lines.keys() - answers))} did not answer in time.")
            for key, _ in ready:
                line: Any = key.fileobj
                messages = line.receive()
                if messages is None:
                    raise NoCoordinator(f"process {key.data} has ended; its own output says why.")
                if messages:
                    answers[key.data], line.unread = messages[0], messages[1:]
                    selector.unregister(line)
    for process, answer in sorted(answers.items()):
        if "bye" in answer or "failed" in answer:
            code = int(answer.get("code", RETRY))
            raise _with_code(f"process {process} has ended; its own output says why.", code)
    return answers


def _with_code(text: str, exit_code: int) -> NoCoordinator:
    error = NoCoordinator(text)
    error.exit_code = exit_code
    return error


def _hello(launch: Launch, token: str = "") -> Message:
    return {
        "program": _MARK,
        "process": launch.process,
        "processes": launch.processes,
        "host": socket.gethostname(),
        "at": f"host {socket.gethostname()}, pid {os.getpid()}",
        "token": token,
    }


def _misfit(launch: Launch, who: dict[int, Message], hello: Message, own: str) -> str:
    """Returns why a process that has connected does not belong to this run; an empty string if it does."""
    process, processes = hello.get("process"), hello.get("processes")
    if processes != launch.processes:
        return (
            f"--num-processes is {launch.processes} in process 0 but {processes} in process {process} "
            f"({hello.get('at')}). Give all processes the same number."
        )
    if not isinstance(process, int) or not 0 <= process < launch.processes:
        return f"--process-id is {process} in one process; it must be from 0 to {launch.processes - 1}."
    before = who.get(process)
    if process == 0 and hello.get("token") != own:
        before = _hello(launch)
    if before is not None:
        return (
            f"two processes have --process-id {process}: {before['at']}, and {hello.get('at')}. Give each process a "
            f"different number from 0 to {launch.processes - 1}."
        )
    return ""


def _address(launch: Launch) -> tuple[str, int]:
    host, _, port = str(launch.coordinator).rpartition(":")
    return host.strip("[]"), int(port)


def _listen(launch: Launch) -> socket.socket:
    """Returns a socket that listens on the coordinator's port, on all addresses of this host, as JAX will.

    Raises:
        NoCoordinator: if the port is taken.
    """
    port = _address(launch)[1]
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        with contextlib.suppress(NoCoordinator, OverflowError):
            _connect_to_itself(launch, 0.0)  # if another process 0 listens there, it learns of this one and ends too
        raise NoCoordinator(
            f"process 0 cannot listen on port {port} of --coordinator {launch.coordinator}: {error}. Either another "
            "program uses the port, or another process has --process-id 0. Choose a free port, the same for all "
            "processes."
        ) from None


def _connect_to_itself(launch: Launch, deadline: float) -> str:
    """Connects process 0 to itself as the others connect to it, and returns the token that it has sent. Until the
    deadline, waits for its name to be known, which a cluster may publish only once the host is up.

    Raises:
        NoCoordinator: if it cannot.
    """
    token = os.urandom(16).hex()
    while True:
        try:
            with socket.create_connection(_address(launch), timeout=_ITSELF_S) as connection:
                Line(connection).send(_hello(launch, token))
            return token
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() >= deadline:
                raise NoCoordinator(_NOT_HERE.format(launch.coordinator, error)) from None
        time.sleep(_RETRY_S)


def _prepared(connection: socket.socket) -> socket.socket:
    """Makes a connection blocking and able to notice that the other host is gone, and returns it."""
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

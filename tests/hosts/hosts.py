"""Hosts made of network namespaces of this machine: each has its own address, name and links that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gtp_jax

from .clocks import Clock

_SUBNET = "10.213.77"


def missing() -> str | None:
    """Returns why this machine cannot make hosts; `None` if it can."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("ip", "tc", "unshare", "nsenter")):
        return "needs root, iproute2 and util-linux"
    probe = subprocess.run(["ip", "netns", "add", "gtp-probe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "gtp-probe"], capture_output=True)
    return None if probe.returncode == 0 else f"cannot make network namespaces: {probe.stderr.strip()}"


class Hosts:
    """Hosts that are connected by a bridge, and the process that each runs.

    Attributes:
        names: the name of each host, which all of them know.
        runs: the process of each host, once started.
        clocks: the wall clocks of hosts, by host; the others have this machine's.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        # two tests may run at once
        self._tag = f"g{os.getpid() % 10000}"
        self.names = [f"{self._tag}n{i}" for i in range(count)]
        self.runs: list[subprocess.Popen[str]] = []
        self.clocks: dict[int, Clock] = {}

    def __enter__(self) -> Hosts:
        table = "127.0.0.1 localhost\n" + "".join(f"{self._address(i)} {name}\n" for i, name in enumerate(self.names))
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("link", "set", self._tag, "up")
        for i, name in enumerate(self.names):
            (etc := Path("/etc/netns", name)).mkdir(parents=True)
            (etc / "hosts").write_text(table)
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}v", "master", self._tag, "up")
            _ip("-n", name, "addr", "add", f"{self._address(i)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for i in range(len(self.runs)):
            self.kill(i)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{name}v"], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._tag], capture_output=True)

    def _address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    def train(self, flags: list[str], *, port: int = 29400, devices: int = 2) -> None:
        """Starts `gtp-jax train` on every host, with the variables by which Kubeflow describes processes."""
        self.runs = []
        for i in range(len(self.names)):
            env = {
                "JAX_NUM_PROCESSES": str(len(self.names)),
                "JAX_PROCESS_ID": str(i),
                "JAX_COORDINATOR_ADDRESS": f"{self.names[0]}:{port}",
            }
            self.runs.append(self.start(i, ["-m", "gtp_jax", "train", *flags, f"--local-devices={devices}"], env))

    def start(self, host: int, words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """Starts Python on a host, in a process group of its own; its output goes to `host0.txt` and so on."""
        name = self.names[host]
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
        here = {"PYTHONPATH": str(Path(gtp_jax.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(
            [*command, sys.executable, *words],
            env={**os.environ, **here, **self._clock_of(host), **env},
            stdout=self._output(host).open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def set_clock(self, host: int, ahead: int) -> None:
        """Sets the wall clock of a host to this many seconds ahead, before its process starts or while it runs."""
        if host not in self.clocks:
            self.clocks[host] = Clock(self.folder / f"clock{host}")
        self.clocks[host].set(ahead)

    def _clock_of(self, host: int) -> dict[str, str]:
        return self.clocks[host].environment if host in self.clocks else {}

    def _output(self, host: int) -> Path:
        return self.folder / f"host{host}.txt"

    def said(self, host: int) -> str:
        """Returns the output of a host."""
        return self._output(host).read_text()

    def cut(self, *hosts: int) -> None:
        """Cuts the links of hosts: packets are lost, as if a cable were unplugged at the switch."""
        for host in hosts:
            _ip("link", "set", f"{self.names[host]}v", "nomaster")

    def mend(self, *hosts: int) -> None:
        """Mends the links of hosts."""
        for host in hosts:
            _ip("link", "set", f"{self.names[host]}v", "master", self._tag)

    def worsen(self, *how: str) -> None:
        """Puts a queueing discipline of `tc`, such as `netem delay 20ms`, on both directions of every link. Skips the
        test with the kernel's reason if the kernel does not have it."""
        for name in self.names:
            for of, device in (((), f"{name}v"), (("-n", name), "eth0")):
                made = subprocess.run(
                    ["tc", *of, "qdisc", "add", "dev", device, "root", *how], capture_output=True, text=True
                )
                if "kind is unknown" in made.stderr:
                    pytest.skip(f"the kernel has no `{how[0]}`: {made.stderr.strip()}")
                assert made.returncode == 0, made.stderr

    def lose(self, percent: int) -> None:
        """Loses this share of the packets that arrive at every host, by a rule of its firewall. Skips the test where
        that is not possible."""
        if shutil.which("nft") is None:
            pytest.skip("needs nftables")
        rules = "add table inet gtp; add chain inet gtp in { type filter hook input priority 0; }; "
        rules += f'add rule inet gtp in iifname "eth0" numgen random mod 100 < {percent} counter drop'
        for name in self.names:
            made = subprocess.run(["ip", "netns", "exec", name, "nft", rules], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"the kernel does not lose packets by chance: {made.stderr.strip()}")

    def lost(self, host: int) -> int:
        """Returns the number of packets that `lose` has lost on the way to a host."""
        command = ["ip", "netns", "exec", self.names[host], "nft", "list", "table", "inet", "gtp"]
        rules = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return int(rules.partition("counter packets ")[2].split()[0])

    def kill(self, host: int) -> None:
        """Kills every process of a host at once, as a loss of power does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.runs[host].pid, signal.SIGKILL)
        self.runs[host].wait()

    def signal(self, host: int, number: signal.Signals) -> None:
        """Sends a signal to every process of a host."""
        os.killpg(self.runs[host].pid, number)

    def within(self, host: int, *command: str) -> None:
        """Runs a command among the mounts of a host's process."""
        subprocess.run(["nsenter", "-t", str(self.runs[host].pid), "-m", *command], check=True)

    def wait(self, seconds: float, *hosts: int) -> list[int]:
        """Returns the exit statuses of hosts, by default all, after at most this time, in seconds."""
        deadline = time.monotonic() + seconds
        chosen = hosts or range(len(self.runs))
        return [self.runs[host].wait(max(0.1, deadline - time.monotonic())) for host in chosen]

    def until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Waits for something that the hosts do."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [i for i, run in enumerate(self.runs) if run.poll() is not None]
            assert not ended, f"host {ended[0]} ended too early: {self.said(ended[0])[-3000:]}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.said(0)[-3000:]}"
            time.sleep(0.05)


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Makes hosts for a test; skips it where that is not possible."""
    if (why := missing()) is not None:
        pytest.skip(why)
    folder.mkdir(parents=True, exist_ok=True)
    with Hosts(count, folder) as made:
        yield made


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

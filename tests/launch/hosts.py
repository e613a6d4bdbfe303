"""Network namespaces as machines: each has its own address, its own name, and a cable that can be pulled.

Run as a script inside of `unshare`, this plays one scenario of `tests.launch.host_scenarios`; nothing of it touches the
network of the machine it runs on.
"""

import os
import shutil
import subprocess
import sys

from tests.jobs.starting import ROOT
from tests.waiting import GUARD

# A user, a network, mounts and processes of its own; what was started there goes with it.
UNSHARE = ["unshare", "-r", "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child"]
SECRET = "a secret of this test, long enough"


def why_not(unshare=UNSHARE):
    """Why namespaces cannot be used here; None if they can."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "the programs unshare and ip are not installed"
    probe = (
        "mount -t tmpfs none /run && mkdir /run/netns && ip netns add probe && ip link add one type veth peer name two"
    )
    done = subprocess.run([*unshare, "sh", "-c", probe], capture_output=True, text=True, timeout=GUARD)
    return f"namespaces are not permitted: {done.stderr.strip()}" if done.returncode else None


def why_no_limit():
    """Why the speed of links cannot be limited here; None if it can."""
    if not shutil.which("tc"):
        return "the program tc is not installed"
    probe = f"ip link add one type veth peer name two && {_limit('one', 100)}"
    done = subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, text=True, timeout=GUARD)
    return f"tc may not limit links: {done.stderr.strip()}" if done.returncode else None


def play(module, *arguments, timeout=400):
    """Run a module in a namespace of its own; gives the completed process."""
    return subprocess.run(
        [*UNSHARE, sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


class Hosts:
    """Machines host0, host1, ... at 10.77.0.1, 10.77.0.2, ..., on one switch."""

    def __init__(self, count):
        self.count = count
        run("mount -t tmpfs none /run")
        run("mkdir -p /run/netns")
        run("ip link set lo up")
        run("ip link add switch type bridge")
        run("ip link set switch up")
        for number in range(count):
            run(f"ip netns add host{number}")
            run(f"ip link add cable{number} type veth peer name eth0 netns host{number}")
            run(f"ip link set cable{number} master switch up")
            inside = f"ip netns exec host{number} ip"
            run(f"{inside} addr add {address(number)}/24 dev eth0")
            run(f"{inside} link set eth0 up")
            run(f"{inside} link set lo up")
        self.jobs = []

    def start(self, number, folder, *arguments, secret=SECRET, **environment):
        """Start fleetrun on one host."""
        out = (folder / f"host{number}.{len(self.jobs)}.txt").open("w")
        command = ["ip", "netns", "exec", f"host{number}", "unshare", "--uts", "sh", "-c"]
        command += [f'hostname host{number}; exec "$@"', "sh", sys.executable, "-m", "fleetx.launch"]
        command += ["--log_dir", str(folder / f"log{number}"), *map(str, arguments)]
        variables = {**os.environ, "FLEETX_JOB_SECRET": secret, **environment}
        job = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables)
        job.output = out.name
        self.jobs.append(job)
        return job

    def limit(self, megabits):
        """So many Mbit/s leave each host, at most."""
        for number in range(self.count):
            run(f"ip netns exec host{number} {_limit('eth0', megabits)}")

    def cut(self, number):
        """Pull the cable: nothing is said to anybody, packets are just lost."""
        run(f"ip link set cable{number} down")

    def mend(self, number):
        run(f"ip link set cable{number} up")


def _limit(device, megabits):
    # The queue holds a second, so that nothing is dropped and sent again.
    return f"tc qdisc replace dev {device} root tbf rate {megabits}mbit burst 256kb latency 1s"


def address(number):
    return f"10.77.0.{number + 1}"


def run(command):
    """A command that must not fail."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"

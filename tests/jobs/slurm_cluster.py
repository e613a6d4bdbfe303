"""SLURM with two machines, on one: slurmctld, and a slurmd on each of two hosts that are network namespaces.

Run as a script inside of `unshare`, this brings the cluster up and keeps it until nobody holds its standard input any
more. Then the kernel ends all that ran in its namespace, whatever became of the tests. Files and sockets lie on a
memory disk of that namespace; only logs outlive it.
"""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.jobs.starting import ROOT
from tests.launch import hosts
from tests.waiting import GUARD, wait_for

# SLURM's daemons give up root's groups, which a namespace of users would not let them: it takes a real root.
UNSHARE = ["unshare", "-n", "-m", "-p", "-u", "-f", "--mount-proc", "--kill-child"]
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "munged", "nsenter")
CONTROLLER = "10.77.0.254"
HOSTS = ("host0", "host1")
FOLDER = Path("/run/slurm")
CONFIGURATION = f"""
ClusterName=tests
SlurmctldHost=control({CONTROLLER})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={FOLDER}/munge
StateSaveLocation={FOLDER}/state
SlurmdSpoolDir={FOLDER}/%n
SlurmctldPidFile={FOLDER}/slurmctld.pid
SlurmdPidFile={FOLDER}/%n.pid
SlurmctldLogFile=LOGS/slurmctld.log
SlurmdLogFile=LOGS/%n.log
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=host0 NodeAddr={hosts.address(0)} CPUs=8
NodeName=host1 NodeAddr={hosts.address(1)} CPUs=8
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@functools.cache
def why_not():
    """Why there can be no cluster here; None if there can."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=_path())]
    if missing:
        return f"SLURM is not installed: there is no {', '.join(missing)} (scripts/install_engines.sh)"
    if os.geteuid() != 0:
        return "SLURM's daemons run as root here"
    return hosts.why_not(UNSHARE)


class SlurmCluster:
    """The cluster, seen from the tests."""

    def __init__(self, logs):
        command = [*UNSHARE, sys.executable, "-m", __name__, str(logs)]
        self.log = logs / "cluster.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | {"PATH": _path()}
            )
        wait_for(self._is_up, lambda: f"cluster: {self.log.read_text()}")

    def _is_up(self):
        assert self._process.poll() is None, self.log.read_text()
        return self.log.read_text().endswith("up\n")

    def inside(self, *command, folder="/"):
        """The command that runs this one in a folder, on the machine with the controller."""
        (init,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        enter = ["nsenter", "--target", init, "--net", "--mount", "--pid", "--uts", f"--wd={folder}"]
        return [*enter, "env", f"SLURM_CONF={FOLDER}/slurm.conf", f"PATH={_path()}", *map(str, command)]

    def run(self, *command, folder="/", **environment):
        """What a command prints there; it must not fail."""
        done = subprocess.run(
            self.inside(*command, folder=folder),
            capture_output=True,
            text=True,
            timeout=2 * GUARD,
            env=os.environ | environment,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, job):
        """What SLURM says of a job, as a dict."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait_for_job(self, job, state, reason="None"):
        """Until a job is in this state for this reason; gives what SLURM says of it."""

        def reached():
            shown = self.show(job)
            return (shown["JobState"], shown["Reason"]) == (state, reason) and shown

        return wait_for(reached, lambda: f"{state} ({reason}) of job {job}: {self.show(job)}")

    def start_again(self, job):
        """Start a job that was requeued, which SLURM lets wait for two minutes; only in the next second, as it must."""
        self.wait_for_job(job, "PENDING", "BeginTime")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def close(self):
        self._process.communicate()


def main():
    """Bring the cluster up, and stay as long as somebody holds our standard input."""
    logs = Path(sys.argv[1])
    hosts.Hosts(len(HOSTS))
    hosts.run(f"ip addr add {CONTROLLER}/24 dev switch")
    FOLDER.mkdir()
    lines = [f"{CONTROLLER} control", *(f"{hosts.address(n)} {name}" for n, name in enumerate(HOSTS))]
    (FOLDER / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    hosts.run(f"mount --bind {FOLDER}/hosts /etc/hosts")
    hosts.run("hostname control")
    (FOLDER / "slurm.conf").write_text(CONFIGURATION.replace("LOGS", str(logs)))
    os.environ["SLURM_CONF"] = f"{FOLDER}/slurm.conf"
    (FOLDER / "key").write_bytes(os.urandom(128))
    (FOLDER / "key").chmod(0o600)
    files = {"key-file": "key", "socket": "munge", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    munge = [f"--{option}={FOLDER}/{name}" for option, name in files.items()]
    hosts.run(" ".join(["munged", "--force", f"--log-file={logs}/munge.log", *munge]))
    hosts.run("slurmctld")
    for name in HOSTS:
        # Not by `ip netns exec`: it would mount /sys again, without the control groups that slurmd looks for.
        own = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts"]
        subprocess.run([*own, "sh", "-c", f"hostname {name} && exec slurmd -N {name}"], check=True)
    print("up", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this is process 1 here, and orphans are its children
    sys.stdin.read()


def _path():
    """Where Debian has the daemons, and the Python of the tests before any other."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])


if __name__ == "__main__":
    main()

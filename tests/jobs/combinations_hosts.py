"""Run in a namespace of its own (tests.launch.hosts.play): two hosts of two workers train the combinations."""

import os
import sys
from pathlib import Path

from tests.jobs.starting import ROOT
from tests.launch.hosts import Hosts, address

GUARD = 700.0  # dozens of trainings


def main():
    folder, chosen = Path(sys.argv[1]), sys.argv[2]
    hosts = Hosts(2)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    options = ["--nnodes", "2", "--master", f"{address(0)}:6170", "--nproc_per_node", "2"]
    script = [ROOT / "tests/jobs/combinations_worker.py", folder, chosen]
    jobs = [hosts.start(n, folder, *options, "--rank", n, *script, PYTHONPATH=path) for n in range(2)]
    codes = [job.wait(GUARD) for job in jobs]
    assert codes == [0, 0], [Path(job.output).read_text()[-3000:] for job in jobs]


if __name__ == "__main__":
    main()

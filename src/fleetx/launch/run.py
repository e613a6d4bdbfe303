"""From options to an exit code."""

import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleetx.launch.banner import configuration
from fleetx.launch.crew import Crew, CrewSettings
from fleetx.launch.folder_lock import locked
from fleetx.launch.gathering import Gathering
from fleetx.launch.job import Job, JobSettings
from fleetx.launch.joining import join
from fleetx.launch.logs import require_folder
from fleetx.launch.network import LOOPBACK, host_name, interface_of, is_here, require_reachable, resolved
from fleetx.launch.options import Options
from fleetx.launch.roster import Roster
from fleetx.launch.say import LaunchError, say, show
from fleetx.launch.secret import VARIABLE, read_secret
from fleetx.launch.stopping import Stopping
from fleetx.launch.worker import PROGRAM


def launch(command: Sequence[str], *, workers: int, environment: Mapping[str, str] | None = None) -> int:
    """Run a script (or `-m module`) with its arguments on `workers` processes of this machine; gives the exit code.

    Worker 0 prints where the caller does, and nothing is kept of what the others print unless one fails.
    """
    show(f"{configuration({'nproc_per_node': workers, 'script': ' '.join(command)})}\n", sys.stdout)
    crew = CrewSettings(list(command), workers, host_name(), log_dir=None, environment=dict(environment or {}))
    try:
        return _run_here(crew, JobSettings(job_id=uuid.uuid4().hex[:8], progress_limit=0, start_limit=0))
    except LaunchError as error:
        say(str(error))
        return 1


def run(options: Options) -> int:
    """Run a job as the command line says; gives the exit code."""
    show(f"{configuration(options.banner())}\n", sys.stdout)
    crew = CrewSettings(
        command=options.command,
        workers=options.workers,
        host=host_name(),
        log_dir=options.log_dir,
        environment=options.devices.environment() if options.devices else {},
        fresh=options.fresh_workers,
        warm=(options.workers > 1 or options.max_restart > 0) and options.command[0] != PROGRAM,
    )
    job = _job(options)
    try:
        require_folder(options.log_dir)
        if options.alone:
            return _run_alone(options, crew, job)
        return _run_among_many(options, crew, job)
    except (LaunchError, ValueError) as error:
        say(str(error))
        return 1


def _job(options: Options) -> JobSettings:
    job_id = options.job_id or uuid.uuid4().hex[:8]
    return JobSettings(
        job_id,
        most_restarts=options.max_restart,
        progress_limit=options.progress_timeout,
        start_limit=options.start_timeout,
        stop_limit=options.stop_timeout,
    )


def _run_alone(options: Options, settings: CrewSettings, job: JobSettings) -> int:
    with locked(options.log_dir, f"job {job.job_id}", settings.host):
        return _run_here(settings, job)


def _run_here(settings: CrewSettings, job: JobSettings) -> int:
    """All workers are on this machine: nothing of the job can be reached from another one."""
    crew = Crew(settings, LOOPBACK, interface_of(LOOPBACK))
    with Stopping().listening() as stopping:
        return Job(job, Roster(crew), stopping).run()


def _run_among_many(options: Options, settings: CrewSettings, job: JobSettings) -> int:
    assert options.master is not None
    master = (resolved("--master", options.master[0]), options.master[1])
    leads = options.rank == 0 or (options.rank is None and is_here(master[0]))
    require_reachable(options.master[0], master[0])
    secret = read_secret(options.secret_file, is_needed=not leads or options.least_hosts > 1)
    if secret is None:
        say(
            f"without a secret no other machine can join, and this one goes on alone. To let others in, give all of "
            f"them the same one, with --secret_file FILE or in the variable {VARIABLE}."
        )
        return _run_alone(options, settings, job)
    name = f"the job that meets at {master[0]}:{master[1]}"
    with locked(options.log_dir, name, settings.host, is_shared=True), Stopping().listening() as stopping:
        if not leads:
            return _follow(options, settings, master, secret, stopping)
        gathering = Gathering(*master, secret, job.job_id, options.most_hosts)
        own = Crew(settings, master[0], interface_of(master[0]))
        roster = Roster(
            own,
            gathering,
            least=options.least_hosts,
            most=options.most_hosts,
            wait=options.join_timeout,
            expected=[resolved("--ips", host) for host in options.ips] if len(options.ips) > 1 else (),
        )
        return Job(job, roster, stopping).run()


def _follow(
    options: Options, settings: CrewSettings, master: tuple[str, int], secret: bytes, stopping: Stopping
) -> int:
    """Take part in a job that another machine leads. An elastic one may go on without us, and take us in again."""
    end = time.monotonic() + options.join_timeout
    while True:
        wait = max(1.0, end - time.monotonic())
        membership = join(
            master, secret, replace(settings), rank=options.rank, job_id=options.job_id, wait=wait, stopping=stopping
        )
        try:
            return membership.serve(stopping)
        except LaunchError as error:
            if options.least_hosts == options.most_hosts or stopping.numbers:
                raise
            say(f"{error} This machine tries to join again.")
            end = time.monotonic() + options.join_timeout

"""The files that users apply to a Kubernetes cluster: each field is known, and what their pods run survives evictions.

There is no cluster here. The published models of the resources read the files; torchrun is started with the commands
and variables of the files, and gets the signal of an eviction.
"""

import copy
import importlib.util
import signal
import socket

import pytest

from tests.jobs.engines import CLUSTERS, DISTURBED, TORCHRUN, weights

pytestmark = pytest.mark.xdist_group("kubernetes")

MODELS = {
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
FILES = ["job.yaml", "trainjob.yaml"]


def resources(name):
    """What a file describes, by kind."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((CLUSTERS / "kubernetes" / name).read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def not_read(given, made):
    """The fields of a document that its model has passed over; the model may add fields."""
    if isinstance(given, dict) and isinstance(made, dict):
        missing = [str(name) for name in given if name not in made]
        shared = [(name, given[name], made[name]) for name in given if name in made]
        return missing + [f"{name}.{field}" for name, one, other in shared for field in not_read(one, other)]
    if isinstance(given, list) and isinstance(made, list) and len(given) == len(made):
        pairs = zip(given, made, strict=True)
        return [f"{index}.{field}" for index, (one, other) in enumerate(pairs) for field in not_read(one, other)]
    return [] if given == made else [repr(given)]


def read_by_model(document):
    models = importlib.import_module("kubeflow_trainer_api.models")
    return getattr(models, MODELS[document["kind"]]).from_dict(document).to_dict()


def dicts_in(value):
    """Every dict of a document, itself included; free names, as those of labels, are left out."""
    if isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name not in ("labels", "selector", "limits", "torch"):
                yield from dicts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from dicts_in(inner)


@pytest.mark.middle
@pytest.mark.parametrize("name", FILES)
def test_the_published_models_know_every_field(name):
    pytest.importorskip("kubeflow_trainer_api", reason="no kubeflow (requirements/engines.txt)")
    for document in resources(name).values():
        assert not_read(document, read_by_model(document)) == []
        for place in range(len(list(dicts_in(document)))):
            wrong = copy.deepcopy(document)
            list(dicts_in(wrong))[place]["unheardOf"] = 1
            assert [field.split(".")[-1] for field in not_read(wrong, read_by_model(wrong))] == ["unheardOf"]


def pods(name):
    """The specification of a file's job, that of its pods, and their container, as the TrainJob completes it."""
    kinds = resources(name)
    if "Job" in kinds:
        job = kinds["Job"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        return job, job["template"]["spec"], container
    (replicated,) = kinds["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    job, trainer = replicated["template"]["spec"], kinds["TrainJob"]["spec"]["trainer"]
    (container,) = job["template"]["spec"]["containers"]
    container |= {"command": trainer["command"], "env": container["env"] + trainer["env"]}
    return job, job["template"]["spec"], container | {"resources": trainer["resourcesPerNode"]}


@pytest.mark.parametrize("name", FILES)
def test_what_belongs_together_in_a_file_fits(name):
    job, pod, container = pods(name)
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
    assert pod["restartPolicy"] == "Never"  # as a policy for failures wants it
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    assert environment["CHECKPOINTS"].startswith(mounted["checkpoints"] + "/")


def test_the_plain_job_meets_at_its_service():
    kinds = resources("job.yaml")
    service, job = kinds["Service"], kinds["Job"]
    _, pod, container = pods("job.yaml")
    options = dict(part.split("=") for part in container["command"] if "=" in part)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options["--master-addr"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert options["--master-port"] == str(container["ports"][0]["containerPort"])
    assert options["--nnodes"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert options["--nproc-per-node"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


def start_pods(job, name, port):
    """What the kubelet does in each pod; on this machine, with one worker in each pod."""
    _, _, container = pods(name)
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    # Kubeflow Trainer's own, in its torch plugin; the plain job has them in its command.
    environment |= {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    environment |= {"PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    assert container["command"][0] == "torchrun"
    assert container["command"][-1] == "examples/clusters/train.py"
    here = {"--master-addr": "127.0.0.1", "--master-port": str(port), "--nproc-per-node": "1"}
    commands, variables = [], []
    for index in ("0", "1"):
        options = dict(part.split("=") for part in container["command"][1:-1])
        options = {option: here.get(option, value) for option, value in options.items()}
        words = [f"{option}={value}".replace("$(JOB_COMPLETION_INDEX)", index) for option, value in options.items()]
        commands.append([*TORCHRUN, *words, DISTURBED])
        variables.append(environment | {"PET_NODE_RANK": index, "CHECKPOINTS": str(job.folder / "checkpoints")})
    job.start(*commands, variables=variables)


@pytest.mark.full
@pytest.mark.parametrize(("name", "evicted"), [("job.yaml", 0), ("job.yaml", 1), ("trainjob.yaml", 0)])
def test_all_pods_save_when_one_is_evicted_and_the_next_ones_resume(disturbed, by_fleetrun, name, evicted):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = disturbed("hold 6")
    start_pods(job, name, port)
    job.wait_until_held()
    job.launchers[evicted].send_signal(signal.SIGTERM)
    assert 0 not in job.end()  # a pod that ends with 0 is complete, and none would take its place
    assert job.saved == ["save-000001-step-8"]
    start_pods(job, name, port)
    assert job.end() == [0, 0], job.log
    assert weights(job.log) == by_fleetrun
    assert "resumed after 8 batches" in job.log

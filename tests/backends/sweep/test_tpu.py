"""Slices are asked for within a quota, run sweeps, survive preemption, and are deleted."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from tables import table

from meshscope.backends.sweep.machine import accelerator_words
from meshscope.backends.sweep.quota import Quota, check_quota, n_chips_in_use, read_quota
from meshscope.errors import SpecError
from meshscope.hardware.topology import parse_topology

PAGE = Path(__file__).parents[3] / "docs" / "tpu-pods.md"
QUOTA = '[[quota]]\nchip = "v6e"\nzone = "us-east1-d"\nchips = 16\nspot = true\n'
ASK = ("--topology", "v6e-8", "--zone", "us-east1-d", "--quota", "quota.toml")
SWEEP = (*ASK, "--wheel", "m.whl", "--jax", "0.10.2")


@pytest.fixture
def tpu(cloud, meshscope):  # noqa: ARG001  the cloud that the commands see
    """`meshscope tpu ...` in a folder with a quota, a wheel and a sweep of two experiments."""
    Path("quota.toml").write_text(QUOTA)
    Path("m.whl").touch()
    write_sweep(2, 4)
    return lambda *words: meshscope("tpu", *words)


def write_sweep(
    *batches: int, command: str = "run", topology: str = "v6e-8", **others: str
) -> None:
    common = {
        "command": command,
        "model": "Llama-3.2-3B",
        "topology": topology,
        "plan": "dp=-1,tp=8",
        **others,
    }
    experiments = [{**common, "batch": batch} for batch in batches]
    Path("e.yaml").write_text(yaml.safe_dump({"experiments": experiments}))


def runs() -> list[str]:
    return sorted(p.parent.name for p in Path("runs/e").glob("*/manifest.json"))


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_preemption_and_deletes_its_slice(tpu, cloud) -> None:
    cloud.set(faults=[{"on": "tpu-vm ssh", "match": "run_on_worker", "then": "preempted"}])
    status, out, err = tpu("sweep", "bench", "e.yaml", *SWEEP)
    assert (status, len(runs())) == (0, 2), err
    assert "2 experiments: 2 done" in out
    assert "lost while it made" in err
    assert len(cloud.calls_of("queued-resources", "create")) == 2
    assert cloud.state["resources"] == {}


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped_and_keeps_a_failure(tpu, cloud) -> None:
    write_sweep(2, 7)
    status, _, err = tpu("sweep", "bench", "e.yaml", *SWEEP, "--keep")
    assert (status, len(runs())) == (1, 1)
    assert "there is no such chip" in err
    assert list(cloud.state["resources"]) == ["bench"]
    n_calls = len(cloud.calls_of("tpu-vm", "ssh"))
    assert tpu("sweep", "bench", "e.yaml", *SWEEP)[0] == 1
    assert len(cloud.calls_of("tpu-vm", "ssh")) == n_calls  # nothing was left to run


def test_a_refused_slice_is_not_deleted_and_the_reason_is_the_message(tpu, cloud) -> None:
    Path("quota.toml").write_text(QUOTA.replace("16", "4"))
    status, _, err = tpu("sweep", "bench", "e.yaml", *SWEEP)
    assert status == 1
    assert "which would be charged" in err
    assert cloud.calls_of("queued-resources", "delete") == []


@pytest.mark.slow
def test_a_finished_sweep_needs_no_slice(tpu, cloud) -> None:
    write_sweep(2)
    assert tpu("sweep", "bench", "e.yaml", *SWEEP)[0] == 0
    n_calls = len(cloud.calls_of("queued-resources", "create"))
    assert tpu("sweep", "bench", "e.yaml", *SWEEP)[0] == 0
    assert len(cloud.calls_of("queued-resources", "create")) == n_calls


@pytest.mark.slow
def test_an_interrupted_sweep_ends_its_command_and_deletes_its_slice(tpu, cloud) -> None:  # noqa: ARG001
    """Ctrl-C reaches the process of meshscope alone, as `kill -INT` does."""
    write_sweep(9)
    cloud.set(polls=1)  # active at once
    command = [sys.executable, "-m", "meshscope", "tpu", "sweep", "bench", "e.yaml", *SWEEP]
    started_s = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as sweep:
        called = cloud.path / "workers" / "0" / "called"
        while not (called.exists() and "--batch 9" in called.read_text()):
            assert time.monotonic() < started_s + 60, "the command never started"
            time.sleep(0.05)
        interrupted_s = time.monotonic()
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(timeout=15) == 130
    assert time.monotonic() - interrupted_s < 10
    assert runs() == []
    assert cloud.state["resources"] == {}


def test_every_host_gets_what_a_front_end_needs(tpu) -> None:
    """TorchXLA on four hosts, with the checkpoint of a bucket."""
    write_sweep(16, topology="v6e-16", frontend="torchxla", checkpoint="gs://weights/llama")
    options = ["v6e-16" if word == "v6e-8" else word for word in SWEEP]
    status, out, err = tpu("sweep", "bench", "e.yaml", *options, "--dry-run")
    assert status == 0, err
    installs, runs_it = (
        [shlex.split(line)[-1] for line in out.splitlines() if f"=bash {script}" in line]
        for script in ("install_on_worker.sh", "run_on_worker.sh")
    )
    assert len(installs) == len(runs_it) == 1
    assert installs[0].endswith(" m.whl '[checkpoint,torchxla]' 0.10.2 weights")
    assert "--frontend torchxla --checkpoint meshscope/buckets/weights/llama" in runs_it[0]


@pytest.mark.slow
def test_workers_of_several_hosts_find_each_other(tpu, cloud) -> None:
    write_sweep(4, topology="v6e-16")
    cloud.set(workers=4, endpoints=",".join(f"x:y:10.0.0.{i}" for i in range(4)))
    options = ["v6e-16" if word == "v6e-8" else word for word in SWEEP]
    assert tpu("sweep", "bench", "e.yaml", *options, "--keep")[0] == 0
    assert len(runs()) == 1
    for worker in range(4):
        several = f"--coordinator 10.0.0.0:8476 --n-processes 4 --process-id {worker}"
        assert cloud.called(worker)[-1].endswith(several)


def test_a_dry_run_prints_each_command_and_runs_none(tpu, cloud) -> None:
    status, out, _ = tpu("sweep", "bench", "e.yaml", *SWEEP, "--project", "p", "--dry-run")
    assert status == 0
    assert cloud.calls == []
    lines = out.splitlines()
    assert all(line.startswith("gcloud compute tpus ") for line in lines)
    assert all(line.endswith(" --project=p") for line in lines)
    assert [line.split()[4] for line in lines if "queued-resources" in line] == [
        "describe", "list", "create", "delete",
    ]  # fmt: skip
    assert sum("run_on_worker.sh " in line and " ssh " in line for line in lines) == 2


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_they_are_written(tpu, cloud) -> None:
    """A reader copies quota file, experiments and command from docs/tpu-pods.md, then leaves out --dry-run."""
    page = PAGE.read_text(encoding="utf-8")
    section = page[: page.index("## One host")]
    for name, language in (("quota.toml", "toml"), ("experiments.yaml", "yaml")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
        Path(name).write_text(text)
    (command,) = re.findall(r"^meshscope tpu (sweep(?:.*\\\n)*.*)", section, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    wheel = Path(words[words.index("--wheel") + 1])
    wheel.parent.mkdir()
    wheel.touch()
    assert tpu(*words)[0] == 0
    assert not cloud.calls
    words.remove("--dry-run")
    status, _, err = tpu(*words)
    assert status == 0, err
    assert len(list(Path("runs/experiments").glob("*/manifest.json"))) == 2
    assert not cloud.state["resources"]


@pytest.mark.slow
def test_create_status_ssh_and_delete(tpu, cloud) -> None:
    assert tpu("status", "bench", "--zone", "us-east1-d")[1] == "bench: missing\n"
    assert tpu("create", "bench", *ASK)[0] == 0
    tpu("status", "bench", "--zone", "us-east1-d")
    assert tpu("status", "bench", "--zone", "us-east1-d")[1] == "bench: ACTIVE\n"
    assert tpu("ssh", "bench", "exit 3", "--zone", "us-east1-d")[0] == 3
    assert tpu("delete", "bench", "--zone", "us-east1-d")[0] == 0
    assert cloud.state["resources"] == {}


def test_chips_in_use_count_against_the_quota(tpu, cloud) -> None:
    for name in ("a", "b"):
        assert tpu("create", name, *ASK)[0] == 0
    status, _, err = tpu("create", "c", *ASK)
    assert (status, sorted(cloud.state["resources"])) == (1, ["a", "b"])
    assert "0 of 16 v6e chips in us-east1-d left" in err


@table
def test_what_would_be_charged_or_is_no_slice_is_refused(tpu, cloud, words, remedy: str) -> None:
    status, _, err = tpu("create", "bench", "--zone", "us-east1-d", *words)
    assert status == 1
    assert remedy in " ".join(err.split())
    assert cloud.calls_of("queued-resources", "create") == []


@table
def test_a_bad_quota_file_is_one_message(tpu, text: str, fault: str) -> None:
    Path("quota.toml").write_text(text)
    status, _, err = tpu("create", "bench", *ASK)
    assert (status, err.count("\n")) == (1, 1)
    assert fault in err


@table
def test_experiments_of_another_slice_are_refused(tpu, cloud, change, fault: str) -> None:
    write_sweep(2, **change)
    status, _, err = tpu("sweep", "bench", "e.yaml", *SWEEP)
    assert status == 1
    assert fault in err
    assert cloud.calls == []


def test_without_gcloud_the_message_says_what_to_install(tpu, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    status, _, err = tpu("delete", "bench", "--zone", "us-east1-d")
    assert status == 1
    assert "gcloud is not installed" in err


@table
def test_names_are_those_of_the_cloud(slice_: str, words: list[str]) -> None:
    """Source: cloud.google.com/tpu/docs, "TPU configurations"."""
    assert accelerator_words(parse_topology(slice_)) == words


def test_setup_is_the_three_steps_of_google_cloud(tpu) -> None:
    """Source: cloud.google.com/tpu/docs, "Set up the Cloud TPU environment"."""
    status, out, _ = tpu("setup", "my-project", "--dry-run")
    assert status == 0
    assert out.splitlines() == [
        "gcloud config set project my-project",
        "gcloud services enable tpu.googleapis.com --project=my-project",
        "gcloud beta services identity create --service=tpu.googleapis.com --project=my-project",
    ]


@table
def test_a_request_names_what_the_project_needs(tpu, cloud, words, shown) -> None:
    status, _, err = tpu("create", "bench", "--topology", "v6e-8", "--zone", "us-east1-d", *words)
    assert status == 0, err
    (call,) = cloud.calls_of("queued-resources create")
    assert set(shown) <= set(call)


@table
def test_every_kind_of_node_counts_against_the_quota(nodes, requests, n_chips: int) -> None:
    chip = parse_topology("v6e-8").chip
    assert n_chips_in_use(nodes, requests, chip, is_spot=True) == n_chips


def test_the_example_quota_is_read() -> None:
    quotas = read_quota(PAGE.parents[1] / "experiments" / "quota.toml")
    assert [quota.chips for quota in quotas] == [64, 32, 64, 64, 64, 32]
    assert [str(q) for q in quotas if not q.spot] == ["32 on-demand v4 chips in us-central2-b"]


def test_two_quotas_of_one_kind_add_up() -> None:
    quotas = [Quota(chip="v6e", zone="z", chips=4, spot=True)] * 2
    check_quota(quotas, parse_topology("v6e-8"), "z", is_spot=True)
    with pytest.raises(SpecError, match="would be charged"):
        check_quota(quotas, parse_topology("v6e-16"), "z", is_spot=True)


@pytest.mark.parametrize("name", ["install_on_worker.sh", "run_on_worker.sh"])
def test_scripts_of_workers_are_sound(name: str) -> None:
    script = str(files("meshscope.backends.sweep") / name)
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)

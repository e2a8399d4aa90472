"""What can go wrong with a slice: runs end as they should, once, and no slice is left behind."""

from pathlib import Path

import pytest
import yaml
from tables import table

from meshscope.backends.sweep import folder, tpu_queue

ASK = ("--topology", "v6e-8", "--zone", "us-east1-d", "--quota", "quota.toml")
SWEEP = (*ASK, "--wheel", "m.whl", "--jax", "0.10.2")


@pytest.fixture
def sweep(cloud, meshscope):
    """`meshscope tpu sweep` of an experiment that takes 1.5 s on its worker, and of a short one."""
    quota = '[[quota]]\nchip = "v6e"\nzone = "us-east1-d"\nchips = 16\nspot = true\n'
    Path("quota.toml").write_text(quota)
    Path("m.whl").touch()
    common = {"command": "run", "model": "Llama-3.2-3B", "topology": "v6e-8", "plan": "tp=8"}
    experiments = [{**common, "batch": batch} for batch in (5, 2)]
    Path("e.yaml").write_text(yaml.safe_dump({"experiments": experiments}))
    cloud.set(polls=1)
    return lambda *words: meshscope("tpu", "sweep", "bench", "e.yaml", *SWEEP, *words)


def n_done() -> int:
    return len(list(Path("runs/e").glob("*/manifest.json")))


@pytest.mark.slow
@table
def test_a_fault_costs_no_run_and_leaves_no_slice(
    sweep, cloud, faults, ends: list[int], says: str
) -> None:
    """`ends`: slices that are asked for, and how often the first experiment is started in all."""
    cloud.set(faults=faults, deleting=1)
    status, out, err = sweep()
    assert (status, n_done()) == (0, 2), err
    assert "2 experiments: 2 done" in out
    n_slices = len(cloud.calls_of("queued-resources create"))
    assert [n_slices, cloud.n_executed(5)] == ends
    assert cloud.n_executed(2) == 1
    assert says in " ".join(err.split())
    assert cloud.state["resources"] == {}
    assert all(fault.get("seen") for fault in cloud.state["faults"])


@pytest.mark.slow
@table
def test_a_fault_that_lasts_stops_the_sweep_and_leaves_no_slice(
    sweep, cloud, monkeypatch, faults, says: str
) -> None:
    """The experiments that are left have not failed: the same command resumes."""
    monkeypatch.setattr(tpu_queue, "N_SLICES", 3)
    cloud.set(faults=faults)
    status, _, err = sweep()
    assert status == 1
    assert says in " ".join(err.split())
    assert cloud.state["resources"] == {}
    assert not Path("runs/e/failures.json").exists()
    cloud.set(faults=[])
    status, _, err = sweep()
    assert (status, n_done()) == (0, 2), err


@pytest.mark.slow
def test_a_slice_that_cannot_be_deleted_is_named(sweep, cloud) -> None:
    cloud.set(faults=[{"on": "queued-resources delete", "then": "refused", "times": 99}])
    status, _, err = sweep()
    assert (status, n_done()) == (1, 2)
    assert "may still exist and be charged" in " ".join(err.split())
    assert "meshscope tpu delete bench --zone=us-east1-d" in " ".join(err.split())


@pytest.mark.slow
def test_limits_of_time_and_money_stop_the_sweep(sweep, cloud) -> None:
    for words in (("--max-hours", "1e-6"), ("--price", "2.7", "--max-cost", "1e-6")):
        status, _, err = sweep(*words)
        assert (status, n_done()) == (1, 0)
        assert "the limit is reached: 0.00 hours of 8 chips" in " ".join(err.split())
        assert cloud.state["resources"] == {}
    status, _, err = sweep("--price", "2.7", "--max-cost", "100")
    assert (status, n_done()) == (0, 2)
    assert "at 2.7 each" in err


@pytest.mark.slow
def test_a_run_that_goes_on_is_picked_up_by_the_next_sweep(sweep, cloud) -> None:
    """The first sweep loses its connection for good while the first experiment runs."""
    lost = {"on": "tpu-vm ssh", "match": "run_on_worker", "then": "unanswered"}
    gone = {"on": "queued-resources describe", "then": "refused", "after": 2, "times": 99}
    cloud.set(faults=[lost, gone])
    status, _, err = sweep("--keep")
    assert (status, n_done()) == (1, 0), err
    cloud.set(faults=[])
    assert sweep()[0] == 0
    assert (n_done(), cloud.n_executed(5)) == (2, 1)
    assert len(cloud.calls_of("queued-resources create")) == 1


@pytest.mark.slow
def test_a_sweep_that_waits_for_the_folder_leaves_the_slice_of_the_other(
    sweep, cloud, monkeypatch
) -> None:
    monkeypatch.setattr(folder, "WAIT_FOR_LOCK_S", 0.1)
    with folder.locked_folder(Path("runs/e")):
        status, _, err = sweep()
    assert status == 1
    assert "another sweep is using" in err
    assert cloud.calls == []


@pytest.mark.slow
def test_a_failed_run_ends_on_every_worker(sweep, cloud) -> None:
    """Workers that would wait for the failed one leave the chips to the next run."""
    document = yaml.safe_load(Path("e.yaml").read_text())
    document["experiments"] = [{**document["experiments"][0], "batch": batch} for batch in (7, 2)]
    Path("e.yaml").write_text(yaml.safe_dump(document))
    status, _, err = sweep()
    assert (status, n_done()) == (1, 1)
    assert "there is no such chip" in err
    stops = [call for call in cloud.calls_of("tpu-vm ssh") if " stop " in call[-1]]
    assert len(stops) == 1


@pytest.mark.slow
def test_checkpoints_are_copied_once_or_mounted(sweep, cloud) -> None:
    """A folder of this machine is copied to every worker; a bucket is mounted there."""
    document = yaml.safe_load(Path("e.yaml").read_text())
    first, second = document["experiments"]
    config = Path(__file__).parents[2] / "model" / "data" / "configs"
    config_file = next(config.glob("*Llama-3.2-3B*"))
    bucket = cloud.path / "buckets" / "weights" / "llama"
    bucket.mkdir(parents=True)
    bucket.joinpath("config.json").write_text(config_file.read_text())
    document["experiments"] = [
        {**first, "checkpoint": "gs://weights/llama"},
        {**second, "model": str(config_file)},
    ]
    Path("e.yaml").write_text(yaml.safe_dump(document))
    status, _, err = sweep()
    assert (status, n_done()) == (0, 2), err
    (installed,) = cloud.path.joinpath("installed").read_text().splitlines()
    assert "meshscope[checkpoint] @ file://" in installed
    assert len([call for call in cloud.calls_of("tpu-vm scp") if str(config_file) in call]) == 1
    n_created = len(cloud.calls_of("queued-resources create"))
    assert sweep()[0] == 0  # the runs are known by what they are
    assert len(cloud.calls_of("queued-resources create")) == n_created


@table
def test_what_cannot_run_is_refused_before_a_slice_is_asked_for(
    sweep, cloud, change, words, says: str
) -> None:
    bucket = cloud.path / "buckets" / "weights" / "other"
    bucket.mkdir(parents=True)
    config = Path(__file__).parents[2] / "model" / "data" / "configs"
    bucket.joinpath("config.json").write_text(next(config.glob("*Qwen3-8B*")).read_text())
    document = yaml.safe_load(Path("e.yaml").read_text())
    document["experiments"] = [{**document["experiments"][0], **change}]
    Path("e.yaml").write_text(yaml.safe_dump(document))
    status, _, err = sweep(*words)
    assert status == 1
    assert says in " ".join(err.split())
    assert not cloud.calls_of("queued-resources create")

# ruff: noqa: T201, ARG001  a command line; every function has the same arguments
"""A stand-in for gcloud: it accepts only commands and flags that gcloud's reference pages list.

CLOUD names a folder. `cloud.json` holds the nodes and queued resources and what is to happen: `polls` describes
until a slice is active, and `faults`, each of which is {on, then, [match], [after], [times], [polls]}: the command,
counted `times` after the first `after` ones that contain `match`, ends as `then` says. `workers/N` is the home of
worker N, where commands of ssh really run, with the tools in `bin`.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
STATE = CLOUD / "cloud.json"
SWITCHES = {"--spot", "--quiet", "--force", "--recurse"}


def parser_of(name, *flags, positional=("name",)):
    parser = argparse.ArgumentParser(prog=f"gcloud {name}", allow_abbrev=False)
    for one in positional:
        parser.add_argument(one)
    parser.add_argument("--project")
    for flag in flags:
        parser.add_argument(flag, **({"action": "store_true"} if flag in SWITCHES else {}))
    return parser


CREATE = (
    "--node-id", "--zone", "--accelerator-type", "--type", "--topology", "--runtime-version", "--network",
    "--subnetwork", "--service-account", "--spot", "--quiet",
)  # fmt: skip
ALPHA = ("--reservation", "--provisioning-model", "--max-run-duration")
PARSERS = {
    "queued-resources create": parser_of("create", *CREATE),
    "alpha queued-resources create": parser_of("create", *CREATE, *ALPHA),
    "queued-resources describe": parser_of("describe", "--zone", "--format"),
    "queued-resources list": parser_of("list", "--zone", "--format", positional=()),
    "queued-resources delete": parser_of("delete", "--zone", "--force", "--quiet"),
    "tpu-vm list": parser_of("list", "--zone", "--format", positional=()),
    "tpu-vm ssh": parser_of("ssh", "--zone", "--worker", "--command", "--ssh-flag"),
    "tpu-vm scp": parser_of(
        "scp", "--zone", "--worker", "--recurse", "--scp-flag", positional=("source", "target")
    ),
}


def main(words):
    with (CLOUD / "calls").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if words[0] == "storage":
        return cat(words)
    is_alpha = words[0] == "alpha"
    words = words[is_alpha:]
    assert words[:2] == ["compute", "tpus"], words
    name = " ".join([*["alpha"] * is_alpha, *words[2:4]])
    arguments = PARSERS[name].parse_args(words[4:])
    assert arguments.zone == "us-east1-d", arguments.zone
    fault = due(" ".join(words[2:4]), " ".join(words[4:]))
    run = globals()[f"{words[2].replace('-', '_')}_{words[3]}"]
    return FAULTS[fault["then"]](arguments, run, fault) if fault else run(arguments)


class Cloud(dict):
    """What cloud.json holds, changed by one process at a time."""

    def __enter__(self):
        self.lock = (CLOUD / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.update(json.loads(STATE.read_text()))
        return self

    def __exit__(self, *_):
        STATE.write_text(json.dumps(self))
        self.lock.close()


def due(command, words):
    """The fault of this command, if one is due."""
    with Cloud() as cloud:
        for fault in cloud["faults"]:
            if fault["on"] != command or fault.get("match", "") not in words:
                continue
            fault["seen"] = fault.get("seen", 0) + 1
            n_before = fault.get("after", 0)
            if n_before < fault["seen"] <= n_before + fault.get("times", 1):
                return fault
    return None


def fail(text, code=1):
    print(f"ERROR: (gcloud) {text}", file=sys.stderr)
    return code


def queued_resources_create(arguments):
    with Cloud() as cloud:
        if arguments.name in cloud["resources"]:
            return fail("ALREADY_EXISTS: the resource exists")
        remove_workers()
        node = {"acceleratorType": arguments.accelerator_type}
        cloud["resources"][arguments.name] = {
            "polls": cloud["polls"],
            "state": {"state": "WAITING_FOR_RESOURCES"},
            "tpu": {"nodeSpec": [{"nodeId": arguments.node_id, "node": node}]},
            **({"spot": {}} if arguments.spot else {}),
        }
        for number in range(cloud["workers"]):
            Path(CLOUD, "workers", str(number)).mkdir(parents=True)
    return 0


def queued_resources_describe(arguments):
    with Cloud() as cloud:
        resource = cloud["resources"].get(arguments.name)
        if resource is None:
            return fail("NOT_FOUND: no such resource")
        state = resource["state"]["state"]
        if state in {"WAITING_FOR_RESOURCES", "DELETING"} or "later" in resource:
            resource["polls"] -= 1
        if resource["polls"] <= 0 and state == "WAITING_FOR_RESOURCES":
            resource["state"]["state"] = "ACTIVE"
        if resource["polls"] <= 0 and "later" in resource:
            resource["state"]["state"] = resource.pop("later")
        if resource["polls"] <= 0 and state == "DELETING":
            del cloud["resources"][arguments.name]
            return fail("NOT_FOUND: no such resource")
        print(json.dumps(resource))
    return 0


def queued_resources_list(arguments):
    with Cloud() as cloud:
        print(json.dumps([*cloud["resources"].values()]))
    return 0


def queued_resources_delete(arguments):
    assert arguments.force, "its node still exists"
    with Cloud() as cloud:
        resource = cloud["resources"].get(arguments.name)
        if resource is None:
            return fail("NOT_FOUND: no such resource")
        remove_workers()
        if cloud["deleting"]:
            resource |= {"polls": cloud["deleting"], "state": {"state": "DELETING"}}
        else:
            del cloud["resources"][arguments.name]
    return 0


def tpu_vm_list(arguments):
    with Cloud() as cloud:
        print(json.dumps(cloud["nodes"]))
    return 0


def tpu_vm_ssh(arguments):
    with Cloud() as cloud:
        resource = cloud["resources"][arguments.name]
        endpoints = cloud["endpoints"]
    if resource["state"]["state"] != "ACTIVE" or "later" in resource:
        return fail("connection refused", 255)
    running = [
        subprocess.Popen(
            ["bash", "-c", arguments.command],
            cwd=home,
            env={
                "HOME": str(home),
                "PATH": f"{CLOUD / 'bin'}:/usr/bin:/bin",
                "WORKER": home.name,
                "ENDPOINTS": endpoints,
                "CLOUD": str(CLOUD),
            },
        )
        for home in homes(arguments.worker)
    ]
    return max(one.wait() for one in running)


def tpu_vm_scp(arguments):
    source, target = arguments.source, arguments.target
    for home in homes(arguments.worker):
        machine, _, path = (source if ":" in source else target).partition(":")
        with Cloud() as cloud:
            resource = cloud["resources"].get(machine, {"state": {"state": "missing"}})
        if resource["state"]["state"] != "ACTIVE" or "later" in resource:
            return fail("connection refused")
        if ":" in target and arguments.recurse:
            shutil.copytree(source, home / path / Path(source).name, dirs_exist_ok=True)
        elif ":" in target:
            shutil.copy(source, home / path)
        else:
            shutil.copytree(home / path, Path(target, Path(path).name))
    return 0


def cat(words):
    """`gcloud storage cat gs://BUCKET/PATH`, from the folder of buckets."""
    assert words[1] == "cat", words
    path = CLOUD / "buckets" / words[2].removeprefix("gs://")
    if not path.is_file():
        return fail(f"The following URLs matched no objects or files: {words[2]}.")
    print(path.read_text())
    return 0


def homes(worker):
    return sorted(CLOUD.glob("workers/*" if worker == "all" else f"workers/{worker}"))


def kill_jobs():
    """Ends what runs on the workers, as when they lose power."""
    for file in CLOUD.glob("workers/*/meshscope/jobs/*/*/pid"):
        with suppress(ProcessLookupError, ValueError):  # it ended
            os.killpg(int(file.read_text()), signal.SIGKILL)


def remove_workers():
    kill_jobs()
    for old in CLOUD.glob("workers/*"):
        shutil.rmtree(old, ignore_errors=True)


def change(name, polls=None, **state):
    """Sets the state of a queued resource, at once or after some describes."""
    with Cloud() as cloud:
        resource = cloud["resources"][name]
        if polls is None:
            resource["state"] = state
        else:
            resource |= {"polls": polls, "later": state["state"]}


def unheard(arguments, run, fault):
    """Nothing arrives."""
    return fail("connection timed out", 255)


def unanswered(arguments, run, fault):
    """The command ran, and its answer is lost."""
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 1)
    run(arguments)
    return fail("connection closed by remote host", 255)


def refused(arguments, run, fault):
    return fail(fault.get("says", "the service is currently unavailable"))


def delayed(arguments, run, fault):
    time.sleep(fault["s"])
    return run(arguments)


def preempted(arguments, run, fault):
    """The slice is lost; with polls, Google Cloud says so after as many describes."""
    run(arguments)
    kill_jobs()
    change(arguments.name, fault.get("polls"), state="SUSPENDED")
    return 255


def ended(arguments, run, fault):
    """The request ends while it waits."""
    says = {"failedData": {"error": {"message": fault["says"]}}} if "says" in fault else {}
    change(arguments.name, state=fault["state"], **says)
    return run(arguments)


def rebooted(arguments, run, fault):
    """The workers start again: nothing runs, and nothing is mounted."""
    kill_jobs()
    for file in CLOUD.glob("workers/*/meshscope/installed"):
        file.write_text(f"{file.read_text().split()[0]} another-boot")
    return fail("connection closed by remote host", 255)


def partial(arguments, run, fault):
    """A copy stops half way."""
    if arguments.recurse and ":" in arguments.source:
        Path(arguments.target, Path(arguments.source).name).mkdir()
    return fail("lost connection")


FAULTS = {
    one.__name__: one
    for one in (unheard, unanswered, refused, delayed, preempted, ended, rebooted, partial)
}

sys.exit(main(sys.argv[1:]))

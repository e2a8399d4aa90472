# ruff: noqa: T201, ARG001, A001  a command line; every function has the same arguments
"""A stand-in for gcloud: it accepts only commands and flags that gcloud's reference pages list.

CLOUD names a folder. `cloud.json` holds the queued resources and what is to happen: `polls` describes
until a slice is active, `preemptions` runs that lose their slice. `workers/N` is the home of worker N,
where commands of ssh really run, with the tools in `bin`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
STATE = CLOUD / "cloud.json"


def parser_of(name, *flags, positional=("name",)):
    parser = argparse.ArgumentParser(prog=f"gcloud {name}", allow_abbrev=False)
    for one in positional:
        parser.add_argument(one)
    parser.add_argument("--project")
    for flag in flags:
        is_switch = flag in {"--spot", "--quiet", "--force", "--recurse"}
        parser.add_argument(flag, **({"action": "store_true"} if is_switch else {}))
    return parser


PARSERS = {
    "queued-resources create": parser_of(
        "create", "--node-id", "--zone", "--accelerator-type", "--runtime-version", "--spot", "--quiet"
    ),
    "queued-resources describe": parser_of("describe", "--zone", "--format"),
    "queued-resources list": parser_of("list", "--zone", "--format", positional=()),
    "queued-resources delete": parser_of("delete", "--zone", "--force", "--quiet"),
    "tpu-vm ssh": parser_of("ssh", "--zone", "--worker", "--command"),
    "tpu-vm scp": parser_of("scp", "--zone", "--worker", "--recurse", positional=("source", "target")),
}  # fmt: skip


def main(words):
    with (CLOUD / "calls").open("a") as file:
        file.write(json.dumps(words) + "\n")
    assert words[:2] == ["compute", "tpus"], words
    name = " ".join(words[2:4])
    arguments = PARSERS[name].parse_args(words[4:])
    assert arguments.zone == "us-east1-d", arguments.zone
    cloud = json.loads(STATE.read_text())
    code = globals()[words[3]](arguments, cloud)
    STATE.write_text(json.dumps(cloud))
    return code


def create(arguments, cloud):
    assert arguments.name not in cloud["resources"], "ALREADY_EXISTS"
    for old in CLOUD.glob("workers/*"):
        shutil.rmtree(old)
    cloud["resources"][arguments.name] = {
        "polls": cloud["polls"],
        "state": {"state": "WAITING_FOR_RESOURCES"},
        "tpu": {"nodeSpec": [{"node": {"acceleratorType": arguments.accelerator_type}}]},
        **({"spot": {}} if arguments.spot else {}),
    }
    for number in range(cloud["workers"]):
        Path(CLOUD, "workers", str(number)).mkdir(parents=True)
    return 0


def describe(arguments, cloud):
    resource = cloud["resources"].get(arguments.name)
    if resource is None:
        print("ERROR: (gcloud) NOT_FOUND: no such resource", file=sys.stderr)
        return 1
    if resource["state"]["state"] == "WAITING_FOR_RESOURCES":
        resource["polls"] -= 1
        if resource["polls"] <= 0:
            resource["state"]["state"] = "ACTIVE"
    print(json.dumps(resource))
    return 0


def list(arguments, cloud):
    print(json.dumps([*cloud["resources"].values()]))
    return 0


def delete(arguments, cloud):
    assert arguments.force, "its node still exists"
    del cloud["resources"][arguments.name]
    return 0


def ssh(arguments, cloud):
    resource = cloud["resources"][arguments.name]
    assert resource["state"]["state"] == "ACTIVE"
    if "run_on_worker" in arguments.command and cloud["preemptions"]:
        cloud["preemptions"] -= 1
        resource["state"]["state"] = "SUSPENDED"
        print("ERROR: connection closed by remote host", file=sys.stderr)
        return 255
    codes = [
        subprocess.run(
            ["bash", "-c", arguments.command],
            cwd=home,
            env={
                "HOME": str(home),
                "PATH": f"{CLOUD / 'bin'}:/usr/bin:/bin",
                "WORKER": home.name,
                "ENDPOINTS": cloud["endpoints"],
            },
            check=False,
        ).returncode
        for home in homes(arguments.worker)
    ]
    return max(codes)


def scp(arguments, cloud):
    source, target = arguments.source, arguments.target
    for home in homes(arguments.worker):
        machine, _, path = (source if ":" in source else target).partition(":")
        assert cloud["resources"][machine]["state"]["state"] == "ACTIVE"
        if ":" in target:
            shutil.copy(source, home / path)
        elif arguments.recurse:
            shutil.copytree(home / path, Path(target, Path(path).name))
    return 0


def homes(worker):
    return sorted(CLOUD.glob("workers/*" if worker == "all" else f"workers/{worker}"))


sys.exit(main(sys.argv[1:]))

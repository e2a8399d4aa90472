"""The versions of packages in another Python interpreter, read without importing them."""

import json
import subprocess
from collections.abc import Mapping, Sequence

ASK_TIMEOUT_S = 60.0

_ASK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
versions = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


def installed_versions(python: str, names: Sequence[str]) -> Mapping[str, str]:
    """Versions of the interpreter (`python`) and of those of the packages that it has.

    OSError, SubprocessError or ValueError if it does not run.
    """
    command = [python, "-c", _ASK, *names]
    done = subprocess.run(command, capture_output=True, timeout=ASK_TIMEOUT_S, check=True)
    return json.loads(done.stdout)

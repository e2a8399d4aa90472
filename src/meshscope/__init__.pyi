# The public names, each with its module: `__init__.py` reads them here when one is first used.
from meshscope.api.check import check as check
from meshscope.api.compare import RunComparison as RunComparison
from meshscope.api.compare import compare as compare
from meshscope.api.compile import compile as compile  # noqa: A004
from meshscope.api.explore import explore as explore
from meshscope.api.flags import flags as flags
from meshscope.api.import_ import import_ as import_
from meshscope.api.lint import LintResult as LintResult
from meshscope.api.lint import lint as lint
from meshscope.api.live import run as run
from meshscope.api.plan import PlanResult as PlanResult
from meshscope.api.plan import plan as plan
from meshscope.api.predict import predict as predict
from meshscope.api.profile import profile as profile
from meshscope.api.run import Run as Run
from meshscope.api.runs import RunSet as RunSet
from meshscope.api.runs import open as open  # noqa: A004
from meshscope.api.serve import ServingRun as ServingRun
from meshscope.api.serve import serve_sim as serve_sim
from meshscope.errors import MeshscopeError as MeshscopeError

__version__: str

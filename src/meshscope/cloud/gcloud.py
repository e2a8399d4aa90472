"""Commands of gcloud: run here, or printed by a dry run."""

import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshscope.errors import MissingToolError, RunError

NOT_FOUND = "NOT_FOUND"
MAX_WORDS = 2_000  # of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class GcloudEnd:
    """How a command ended, and what it wrote."""

    returncode: int
    out: str
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gcloud:
    """Runs `gcloud` commands in a project, None for the one that gcloud is set to.

    With `show`, nothing runs: it receives each command as a line of shell.
    """

    project: str | None = None
    show: Callable[[str], None] | None = None
    running: set[subprocess.Popen[bytes]] = field(
        default_factory=set[subprocess.Popen[bytes]], compare=False, repr=False
    )

    def run(self, words: Sequence[str]) -> GcloudEnd:
        """Runs `gcloud WORDS`, or shows it and succeeds; MissingToolError without gcloud."""
        command = ["gcloud", *words, *([f"--project={self.project}"] if self.project else [])]
        if self.show is not None:
            self.show(shlex.join(command))
            return GcloudEnd(returncode=0, out="", log="")
        try:
            return self._run(command)
        except FileNotFoundError as error:
            raise MissingToolError(
                "gcloud is not installed. Install the Google Cloud CLI, then run 'gcloud auth login'."
            ) from error

    def _run(self, command: Sequence[str]) -> GcloudEnd:
        # Files, not pipes: an ssh that outlives its gcloud would keep a pipe open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=log)
            self.running.add(process)
            try:
                returncode = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
            finally:
                self.running.discard(process)
            texts: list[str] = []
            for file in (out, log):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return GcloudEnd(returncode=returncode, out=texts[0], log=texts[1])

    def end_commands(self, *, kill: bool = False) -> None:
        """Terminates, or kills, the commands that other threads run."""
        for process in tuple(self.running):
            (process.kill if kill else process.terminate)()

    def succeed(self, words: Sequence[str]) -> str:
        """Runs a command that must succeed, and returns its output; RunError with its message if it fails."""
        end = self.run(words)
        if end.returncode:
            raise RunError(f"'gcloud {shlex.join(words[:4])} ...' failed: {last_words(end.log)}")
        return end.out

    def document(self, words: Sequence[str]) -> Any:
        """The JSON that a command prints; None if what it asks for does not exist, or in a dry run."""
        end = self.run([*words, "--format=json"])
        if end.returncode and NOT_FOUND in end.log:
            return None
        if end.returncode:
            raise RunError(f"'gcloud {shlex.join(words[:4])} ...' failed: {last_words(end.log)}")
        if self.show is not None:
            return None
        try:
            return json.loads(end.out)
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"'gcloud {shlex.join(words[:4])} ...' printed no JSON: {error}."
            ) from error


def last_words(log: str) -> str:
    """The last lines of a log, without blank ones; `no message` if it is empty."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return " ".join(lines[-3:])[-MAX_WORDS:] or "no message"

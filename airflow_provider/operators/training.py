"""The parameters of a training, and where its files come from and go to."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider.operators.base import GpuFlowsOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from gpu_flows.training.spec import TrainingSpec


class TrainingOperator(GpuFlowsOperator):
    """A task that trains: the parameters are the fields of `gpu_flows.TrainingSpec`.

    Args:
        entrypoint: What to run: ``train.py``, ``-m acme.train``, ``train.sh``, or a line for bash.
        args: Arguments of the script, passed on byte for byte.
        env: Environment variables; not the place for secrets.
        secrets: Names of secrets, or a table from the variable's name to its source: ``conn:ID`` for a
            connection's password, ``var:NAME`` for a Variable, else a variable of the worker or a Variable.
        launcher: ``torchrun``, ``python`` or ``command``.
        nproc_per_node: Processes on each box; one per GPU unless given.
        code: Folder or file to upload; relative to the folder of the DAG's file.
        include: Globs of files to upload although git ignores them.
        setup: Commands for bash to run before.
        outputs: Globs of files to fetch.
        outputs_to: Where to: a URL (``s3://conn_id@bucket/path``) or a folder of the worker.
        heartbeat_timeout_s: How long the boxes live on when nobody follows the job; None for their deadline.
    """

    SPEC: ClassVar[tuple[str, ...]] = (
        "entrypoint",
        "args",
        "env",
        "secrets",
        "launcher",
        "nproc_per_node",
        "code",
        "include",
        "setup",
        "outputs",
        "outputs_to",
    )
    template_fields: Sequence[str] = SPEC

    def __init__(
        self,
        *,
        entrypoint: str,
        args: Sequence[Any] | str = (),
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | Sequence[str] = (),
        launcher: str | None = None,
        nproc_per_node: int | str | None = None,
        code: str | None = None,
        include: Sequence[str] | str = (),
        setup: Sequence[str] | str = (),
        outputs: Sequence[str] | str = (),
        outputs_to: Any = None,
        heartbeat_timeout_s: float | None = 1800,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.entrypoint = entrypoint
        self.args = args
        self.env = env
        self.secrets = secrets
        self.launcher = launcher
        self.nproc_per_node = nproc_per_node
        self.code = code
        self.include = include
        self.setup = setup
        self.outputs = outputs
        self.outputs_to = outputs_to
        self.heartbeat_timeout_s = heartbeat_timeout_s

    def training_spec(
        self, context: Context, *, nodes: int, max_duration: timedelta, image: Any = None
    ) -> TrainingSpec:
        """Return what is to be run.

        Raises:
            BadRequest: Naming the field that is wrong.
        """
        from gpu_flows.training.spec import TrainingSpec

        folder = Path(context["dag"].fileloc).parent
        entrypoint, code = located(str(self.entrypoint), self.code, self.launcher, folder)
        given = {
            "launcher": self.launcher,
            "nproc_per_node": self.nproc_per_node or None,
            "outputs_to": None if self.outputs_url else self.outputs_to,
            "env": self.env,
            "image": image,
        }
        return TrainingSpec(
            entrypoint=entrypoint,
            args=self.args,
            secrets=self.secrets,
            code=code,
            include=self.include,
            setup=self.setup,
            outputs=self.outputs,
            nodes=nodes,
            max_duration=max_duration,
            **{name: value for name, value in given.items() if value is not None},
        )

    @property
    def outputs_url(self) -> str | None:
        """Where outputs are copied to, when it is no folder of the worker."""
        text = str(self.outputs_to) if self.outputs_to is not None else ""
        return text if "://" in text else None

    def deliver(self, report: dict[str, Any], spec: TrainingSpec) -> dict[str, Any]:
        """Copy fetched outputs to their URL; return the report with the places where they are."""
        if not report["outputs"]:
            return report
        url = self.outputs_url
        if url is None:
            self.log.warning(
                "outputs lie on this worker only, in %s: name a URL by outputs_to to keep them",
                Path(report["outputs"][0]).parent,
            )
            return report
        root = Path(spec.outputs_to) if spec.outputs_to else Path(report["folder"]) / "outputs"
        return {**report, "outputs": [_copied(Path(path), root, url) for path in report["outputs"]]}

    def show_line(self, where: str, line: str) -> None:
        """Write a line of the job into the task's log."""
        self.log.info("%s", shown(where, line))


def shown(where: str, line: str) -> str:
    """Return a line as it stands in a task's log: rank 0 speaks for itself, the others say who they are."""
    return line if where == "rank 0" else f"[{where}] {line}"


def located(entrypoint: str, code: str | None, launcher: str | None, folder: Path) -> tuple[str, str]:
    """Return entrypoint and code, relative paths taken from the folder of the DAG's file.

    The current folder of a worker is nobody's choice; the DAG's file comes with its bundle.
    """
    if code:
        return entrypoint, str(folder / Path(code).expanduser())
    is_line = launcher == "command" and not entrypoint.endswith(".sh")
    if entrypoint.startswith("-m ") or is_line:
        return entrypoint, str(folder)
    script = folder / Path(entrypoint).expanduser()
    return script.name, str(script.parent)


def _copied(path: Path, root: Path, url: str) -> str:
    from airflow.sdk import ObjectStoragePath

    target = ObjectStoragePath(url) / path.relative_to(root).as_posix()
    target.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return str(target)

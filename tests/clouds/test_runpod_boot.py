"""What a pod runs, run in a real container: a root of its own, and process ids of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import BoxState
from gpu_flows.clouds.runpod.boot import container_args, terminate_command
from gpu_flows.leases.deadman import boot_script
from tests.clouds.contract import box_name, until
from tests.clouds.test_runpod import asked, spec
from tests.emulators.runpod import KEY, RunpodEmulator

POD = {"RUNPOD_POD_ID": "pod7", "RUNPOD_API_KEY": "rpa_POD7", "PUBLIC_KEY": "ssh-ed25519 AAAA me"}
_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@cache
def containers_work() -> bool:
    if os.geteuid() != 0 or shutil.which("busybox") is None:
        return False
    return subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode == 0


class Container:
    """A root file system with busybox, and whatever is started in it as PID 1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        self._started: list[subprocess.Popen[bytes]] = []
        for folder in ("bin", "usr/sbin", "proc", "tmp", "dev", "root", "run"):
            (root / folder).mkdir(parents=True)
        busybox = shutil.which("busybox")
        assert busybox is not None
        linked = subprocess.run(["ldd", busybox], capture_output=True, text=True).stdout
        for file in [busybox, *(word for word in linked.split() if word.startswith("/"))]:
            target = root / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        shutil.copy(busybox, root / "bin/busybox")
        subprocess.run(["chroot", root, "/bin/busybox", "--install", "-s", "/bin"], check=True)
        (root / "dev/null").touch()

    def program(self, path: str, text: str) -> None:
        file = self.root / path
        file.unlink(missing_ok=True)  # it may be a link to busybox
        file.write_text(f"#!/bin/sh\n{text}")
        file.chmod(0o755)

    def start(self, args: str, environment: Mapping[str, str] = POD) -> subprocess.Popen[bytes]:
        """Run a pod's arguments as its image's entrypoint would, split as a shell splits them."""
        process = subprocess.Popen(
            [*_UNSHARE[:-1], f"--mount-proc={self.root}/proc", "chroot", str(self.root), *shlex.split(args)],
            env={"PATH": "/bin:/usr/sbin", "HOME": "/root", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.root / "stderr").open("ab"),
        )
        self._started.append(process)
        return process

    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def close(self) -> None:
        for process in self._started:
            process.kill()  # and with it everything in its container
            process.wait()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    if not containers_work():
        pytest.skip("containers need root, unshare and busybox")
    container = Container(tmp_path / "root")
    yield container
    container.close()


def test_the_boot_script_runs_and_then_what_the_image_starts(container: Container) -> None:
    container.program("start.sh", 'echo "start.sh of $$ for $PUBLIC_KEY" >>/log')
    process = container.start(container_args("echo booted as $$ >>/log\n"))
    until(lambda: len(container.said()) == 2, "both have run")
    assert container.said()[0] == "booted as 1"
    assert container.said()[1].endswith("for ssh-ed25519 AAAA me")
    # start.sh has ended, and the container goes on: it would be started again for ever.
    assert process.poll() is None


def test_an_image_without_start_sh_gets_an_sshd(container: Container) -> None:
    container.program(
        "usr/sbin/sshd", 'echo "sshd $*" >>/log; cat /root/.ssh/authorized_keys >>/log; sleep 60'
    )
    container.program("bin/ssh-keygen", 'echo "ssh-keygen $*" >>/log')
    container.start(container_args("true\n"))
    until(lambda: len(container.said()) == 3, "sshd has been started")
    assert container.said() == ["ssh-keygen -A", "sshd -D -e", "ssh-ed25519 AAAA me"]


def test_an_image_without_sshd_gets_one_installed(container: Container) -> None:
    container.program(
        "bin/apt-get", 'echo "apt-get $*" >>/log; [ "$1" = update ] || cp /bin/sshd.new /usr/sbin/sshd'
    )
    container.program("bin/sshd.new", 'echo "sshd $*" >>/log; sleep 60')
    container.program("bin/ssh-keygen", "")
    container.start(container_args("true\n"))
    until(lambda: len(container.said()) == 3, "sshd has been started")
    assert container.said()[2] == "sshd -D -e"
    assert "openssh-server" in container.said()[1]


def test_the_dead_man_ends_the_pod_by_its_own_key_though_nobody_ever_connects(container: Container) -> None:
    container.program("start.sh", "exit 1")
    container.program("bin/curl", 'echo "curl $*" >>/log; cat >>/log')
    deadline = datetime.now(UTC) + timedelta(seconds=1)
    script = boot_script(
        deadline, terminate_command("https://api.runpod.io"), length_s=1, tick_s=0.2, retry_s=60
    )
    container.start(container_args(script))
    until(lambda: len(container.said()) == 2, "the dead-man has fired")
    command, header = container.said()
    assert "-K -" in command
    assert command.endswith('-d {"action":"terminate"} https://api.runpod.io/v2/pods/pod7/action')
    assert header == 'header = "Authorization: Bearer rpa_POD7"'
    assert "rpa_POD7" not in command


def test_a_container_that_is_started_again_keeps_its_deadline(container: Container) -> None:
    container.program("start.sh", "sleep 60")
    ends = "echo ended >>/log"
    script = boot_script(datetime.now(UTC) + timedelta(seconds=4), ends, length_s=4, tick_s=0.2, retry_s=60)
    first = container.start(container_args(f"echo booted >>/log\n{script}"))
    until(lambda: container.said() == ["booted"], "it has begun")
    first.kill()
    first.wait()
    shutil.rmtree(container.root / "root")  # the container's disk is new after a restart
    (container.root / "root").mkdir()
    container.start(container_args(f"echo booted >>/log\n{script}"))
    until(lambda: "ended" in container.said(), "the dead-man has fired")
    assert datetime.now(UTC).timestamp() >= first_deadline(script)


def first_deadline(script: str) -> int:
    return int(script.split('c="')[1].split()[0])


def test_a_session_without_the_pods_environment_finds_it_in_pid_1(container: Container) -> None:
    container.program("bin/curl", 'echo "curl $*" >>/log; cat >>/log')
    end = shlex.quote(terminate_command("http://api"))
    container.start(container_args(f"env -i PATH=$PATH sh -c {end}\n"))
    until(lambda: len(container.said()) == 2, "it has been asked for its end")
    assert "/v2/pods/pod7/action" in container.said()[0]
    assert "rpa_POD7" in container.said()[1]


def test_what_the_image_has_exported_is_the_last_resort(container: Container) -> None:
    container.program("bin/curl", 'echo "curl $*" >>/log; cat >>/log')
    (container.root / "etc").mkdir()
    (container.root / "etc/rp_environment").write_text(
        'export RUNPOD_POD_ID="pod8"\nexport RUNPOD_API_KEY="rpa_POD8"\nexport PATH="/bin"\n'
    )
    container.start(container_args(terminate_command("http://api")), {})
    until(lambda: len(container.said()) == 2, "it has been asked for its end")
    assert "/v2/pods/pod8/action" in container.said()[0]
    assert "rpa_POD8" in container.said()[1]


# The self-destruct alone, against the API.


@pytest.fixture
def emulator() -> Iterator[RunpodEmulator]:
    with RunpodEmulator() as emulator:
        yield emulator
        for row in emulator.live():
            emulator.end(row)


@pytest.fixture
def pod(emulator: RunpodEmulator) -> dict[str, str]:
    """Return the environment of a pod that was rented."""
    cloud = open_cloud("runpod", api_key=KEY, base_url=emulator.url)
    box = cloud.create(cloud.offers(asked("A6000"))[0], spec())
    return {"RUNPOD_POD_ID": box.id, "RUNPOD_API_KEY": emulator.book[box.id].data["key"]}


def with_only(folder: Path, *programs: str) -> str:
    """Return a PATH that has these programs and no others."""
    folder.mkdir()
    for name in ("sh", "tr", "sed", "env", *programs):
        # Python itself, and not a script that picks one.
        found = os.path.realpath(sys.executable) if name == "python3" else shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return str(folder)


def end(emulator: RunpodEmulator, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    text = terminate_command(emulator.url)
    return subprocess.run(
        ["/bin/sh", "-c", text], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("programs", [("curl",), ("python3",), ("curl", "python3")])
def test_a_pod_ends_itself_with_what_its_image_has(
    emulator: RunpodEmulator, pod: dict[str, str], tmp_path: Path, programs: tuple[str, ...]
) -> None:
    done = end(emulator, {**pod, "PATH": with_only(tmp_path / "bin", *programs)})
    assert done.returncode == 0, done.stderr
    assert emulator.live() == []
    assert emulator.calls["action"] == 1
    request = emulator.requests[-1]
    assert "gpu-flows" in request.headers["user-agent"]
    assert request.headers["content-type"] == "application/json"


def test_a_pod_without_both_uses_the_vendors_own_program(
    emulator: RunpodEmulator, pod: dict[str, str], tmp_path: Path
) -> None:
    path = with_only(tmp_path / "bin")
    (tmp_path / "bin" / "runpodctl").write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/told\n')
    (tmp_path / "bin" / "runpodctl").chmod(0o755)
    assert end(emulator, {**pod, "PATH": path}).returncode == 0
    assert (tmp_path / "told").read_text() == f"remove pod {pod['RUNPOD_POD_ID']}\n"


def test_an_end_that_did_not_work_fails_so_that_it_is_tried_again(
    emulator: RunpodEmulator, pod: dict[str, str], tmp_path: Path
) -> None:
    path = with_only(tmp_path / "bin", "curl", "python3")
    wrong = {**pod, "RUNPOD_API_KEY": "rpa_OFANOTHERPOD", "PATH": path}
    done = end(emulator, wrong)
    assert done.returncode != 0
    assert "rpa_OFANOTHERPOD" not in done.stderr
    assert len(emulator.live()) == 1
    nameless = end(emulator, {"PATH": path})
    assert nameless.returncode == 1
    assert "no RUNPOD_POD_ID" in nameless.stderr


def test_a_pods_key_reaches_no_other_pod(
    emulator: RunpodEmulator, pod: dict[str, str], tmp_path: Path
) -> None:
    """What the emulator holds the self-destruct to: a pod-scoped key."""
    cloud = open_cloud("runpod", api_key=KEY, base_url=emulator.url)
    other = cloud.create(cloud.offers(asked("A6000"))[0], spec(name=box_name()))
    path = with_only(tmp_path / "bin", "curl")
    assert end(emulator, {**pod, "RUNPOD_POD_ID": other.id, "PATH": path}).returncode != 0
    assert cloud.describe(other).state is BoxState.RUNNING


def test_the_arguments_are_small_and_the_same_for_the_same_box() -> None:
    cloud = open_cloud("runpod", api_key=KEY)
    text = cloud.self_destruct(spec())
    assert text is not None
    script = boot_script(datetime.now(UTC), text, length_s=90_000)
    args = container_args(script)
    assert len(args) < 4096
    assert args == container_args(script)
    assert KEY not in script

"""The launch on one node, run by every shell that a box may have, with a stand-in for torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_flows.training.commands import NodeCommand, node_command
from gpu_flows.training.diagnose import diagnose
from gpu_flows.training.spec import TrainingSpec
from tests.training.nodes import BASE_PYTHON, Node

SHELLS = ("dash", "bash", "busybox sh")

# Reports what a script sees; -S and the like are not needed, a bare Python starts in 20 ms.
SEE = """\
import json, os, sys
json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "path": sys.path}, open("seen.json", "w"))
"""

C45 = [
    '+note="a=b"',
    "+d={x:1,y:[2,3]}",
    "opt.lr=1e-3",
    "name=two words",
    "--",
    "-m",
    "--nproc-per-node",
    "--mo",
    "",
    " ",
    "'",
    '"',
    "\\",
    "$HOME `id` $(id)",
    "*",
    "~",
    "a\nb\n",
    "\r\n",
    "\t",
    "#no comment",
    "漢字 é 🙂",
    "!x;&|<>",
    "%s",
    "\x01\x7f",
]


def plan(spec: TrainingSpec, code: Path, **options: object) -> NodeCommand:
    return node_command(spec, **{"node": 0, "nodes": 1, "nproc": 1, "code_dir": str(code), **options})


def code_of(node: Node, files: Mapping[str, str]) -> Path:
    folder = node.home / "the code"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def seen(code: Path) -> dict[str, object]:
    return json.loads((code / "seen.json").read_text())


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_c45_arguments_arrive_byte_for_byte(
    new_node: Callable[..., Node], shell: str, launcher: str, tmp_path: Path
) -> None:
    program = tmp_path / "shell"
    program.write_text(f'#!/bin/sh\nexec {shell} "$@"\n')
    program.chmod(0o755)
    node = new_node(shell=str(program))
    code = code_of(node, {"see.py": SEE})
    # What the launch itself calls sh is that shell, too.
    (node.home / "bin").mkdir()
    shutil.copy(program, node.home / "bin" / "sh")
    spec = TrainingSpec(entrypoint="see.py", args=C45, launcher=launcher)
    assert node.run(plan(spec, code)) == 0, node.log()
    assert seen(code)["argv"] == C45


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("shell", SHELLS)
def test_c45_any_words_arrive_byte_for_byte(shell: str, tmp_path: Path) -> None:
    """The words pass one quoting and one shell, whichever it is."""
    see = tmp_path / "see"
    see.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    see.chmod(0o755)
    ranks = tmp_path / "ranks"
    ranks.mkdir()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(TEXT, max_size=5))
    def check(args: list[str]) -> None:
        spec = TrainingSpec(entrypoint="x.py", args=args, launcher="python")
        (tmp_path / "rank.sh").write_bytes(plan(spec, tmp_path).files["rank.sh"])
        (ranks / "0.log").unlink(missing_ok=True)
        env = {
            "PATH": os.environ["PATH"],
            "GPU_FLOWS_JOB_DIR": str(tmp_path),
            "GPU_FLOWS_NODE_RANK": "0",
            "GPU_FLOWS_NPROC_PER_NODE": "1",
            "GPU_FLOWS_ROOT": str(tmp_path),
            "GPU_FLOWS_PYTHON": str(see),
            "GPU_FLOWS_PYTHONPATH": "",
            "GPU_FLOWS_TIE": "",
        }
        subprocess.run([*shell.split(), str(tmp_path / "rank.sh")], env=env, check=True)
        words = (ranks / "0.log").read_bytes().split(b"\0")[1:-1]  # the script's own name comes first
        assert words == [arg.encode() for arg in args]

    check()


def test_what_a_script_finds(node: Node) -> None:
    code = code_of(node, {"see.py": SEE})
    (code / "src").mkdir()
    spec = TrainingSpec(entrypoint="see.py", env={"MINE": "a 'b' $c", "MPLBACKEND": "svg"})
    box = {"WORLD_SIZE": "16", "NODE_RANK": "3", "PET_NNODES": "2:4", "GROUP_RANK": "9"}
    assert node.run(plan(spec, code, nproc=2), env=box) == 0, node.log()
    found = seen(code)
    env = found["env"]
    assert found["cwd"] == str(code)
    assert env["MINE"] == "a 'b' $c"
    assert env["WORLD_SIZE"] == "2", "the box's own is not meant for our ranks"
    assert not {"NODE_RANK", "PET_NNODES", "GROUP_RANK"} & set(env)
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["MPLBACKEND"] == "svg", "the user's own wins"
    assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    path = env["PYTHONPATH"].split(":")
    assert path[:2] == [str(code), str(code / "src")]
    assert path[-1] == str(node.job() / "python"), (
        "gpu_flows.distributed comes after everything of the user's"
    )
    assert "torchrun --nproc-per-node=2 --standalone see.py" in node.log()


def test_distributed_rides_along_where_gpu_flows_is_not_installed(
    new_node: Callable[..., Node], tmp_path: Path
) -> None:
    where = "from gpu_flows import distributed as d; print(d.__file__, d.world_size()); open('ok', 'w')"
    bare, installed = new_node(), new_node(path=(*Node(tmp_path).path, tmp_path / "lib"))
    package = tmp_path / "lib" / "gpu_flows"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "distributed.py").write_text("def world_size(): return 'installed'\n")
    for node, expected in (
        (bare, f"{bare.job()}/python/gpu_flows/distributed.py 1"),
        (installed, "installed"),
    ):
        code = code_of(node, {"train.py": where})
        assert node.run(plan(TrainingSpec(entrypoint="train.py"), code)) == 0, node.log()
        assert expected in node.rank_log(0)


def test_u01_a_package_in_src_runs_as_a_module(node: Node) -> None:
    code = code_of(
        node,
        {
            "src/acme_fc/__init__.py": "",
            "src/acme_fc/data/__init__.py": "",
            "src/acme_fc/data/loader.py": "from importlib.resources import files\n"
            "def table(): return files('acme_fc.data').joinpath('table.csv').read_text()\n",
            "src/acme_fc/train.py": "import os, sys\nfrom .data import loader\n"
            "print(loader.table(), sys.argv, os.getcwd())\n",
        },
    )
    (code / "src" / "acme_fc" / "data" / "table.csv").write_text("a,b")
    spec = TrainingSpec(entrypoint="-m acme_fc.train", args=["--lr", "1"])
    assert node.run(plan(spec, code)) == 0, node.log()
    assert node.rank_log(0).split()[0] == "a,b"
    assert node.rank_log(0).rstrip().endswith(f"'--lr', '1'] {code}")


def test_u07_outputs_are_relative_to_the_uploads_root_wherever_the_script_lies(node: Node) -> None:
    code = code_of(
        node, {"jobs/train.py": "import sys; sys.path; open('out.txt', 'w').write('x'); import lib"}
    )
    (code / "lib.py").write_text("")
    assert node.run(plan(TrainingSpec(entrypoint="jobs/train.py", code="x"), code)) == 0, node.rank_log(0)
    assert (code / "out.txt").exists()


def test_u13_python_runs_one_copy_without_a_rank(node: Node) -> None:
    code = code_of(node, {"see.py": SEE + "print('one')\n"})
    spec = TrainingSpec(entrypoint="see.py", launcher="python")
    box = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.9"}
    assert node.run(plan(spec, code, nproc=spec.processes(gpus=8)), env=box) == 0, node.log()
    assert not set(box) & set(seen(code)["env"])
    assert node.rank_log(0) == "one\n"
    assert node.rank_exit(0)[:2] == ["0", "exit"]


def test_u13_torchrun_gives_every_copy_a_rank(node: Node) -> None:
    code = code_of(node, {"train.py": "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"})
    spec = TrainingSpec(entrypoint="train.py")
    assert node.run(plan(spec, code, nproc=spec.processes(gpus=8))) == 0, node.log()
    assert [node.rank_log(rank) for rank in range(8)] == [f"{rank} 8\n" for rank in range(8)]


def test_u15_a_shell_file_runs_through_bash(node: Node) -> None:
    code = code_of(
        node, {"train.sh": 'set -euo pipefail\nsource ./env.sh\n[[ $X == 1 ]]\necho "$@" | tee out.txt\n'}
    )
    (code / "env.sh").write_text("X=1\n")
    assert not os.access(code / "train.sh", os.X_OK), "the exec bit is lost on Windows"
    assert node.run(plan(TrainingSpec(entrypoint="train.sh", args=["a b", "c"]), code)) == 0, node.rank_log(0)
    assert node.rank_log(0) == "a b c\n"


def test_a_command_is_a_line_for_bash_with_its_arguments(node: Node) -> None:
    code = code_of(node, {"x.py": "import sys; print(sys.argv[1:])"})
    line = 'set -o pipefail; [[ $GPU_FLOWS_NPROC_PER_NODE == 4 ]] && python3 x.py "$@" | cat; exit 3'
    spec = TrainingSpec(entrypoint=line, launcher="command", args=["two words", "--"])
    assert node.run(plan(spec, code, nproc=4)) == 3
    assert node.rank_log(0) == "['two words', '--']\n"
    assert node.rank_exit(0)[:2] == ["3", "exit"]


def test_u11_a_job_is_done_when_its_main_process_is(node: Node, until: Callable[..., None]) -> None:
    daemon = (
        "import os, sys, time\n"
        "print('main', flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
    )
    code = code_of(node, {"train.py": daemon})
    assert node.run(plan(TrainingSpec(entrypoint="train.py"), code), timeout_s=20) == 0
    assert node.rank_exit(0)[:2] == ["0", "exit"]
    assert len(node.processes()) == 1, "the daemon carries the job's marker, by which it is found and ended"


@pytest.mark.parametrize(
    ("code", "record"),
    [("import sys; sys.exit(37)", ["37", "exit"]), ("import os; os.kill(os.getpid(), 9)", ["137", "signal"])],
)
def test_c35_every_rank_leaves_the_truth_about_its_end(node: Node, code: str, record: list[str]) -> None:
    script = f"import os, time\nif os.environ['RANK'] == '1':\n    {code}\ntime.sleep(600)\n"
    assert (
        node.run(plan(TrainingSpec(entrypoint="train.py"), code_of(node, {"train.py": script}), nproc=2)) == 1
    )
    assert node.rank_exit(1)[:2] == record
    assert node.rank_exit(0)[:2] == ["143", "signal"], "torchrun ended it"
    assert int(node.rank_exit(1)[2]) <= int(node.rank_exit(0)[2])
    found = diagnose([node.evidence(0, exit_code=1)])
    assert (found.rank, found.exit_code) == (1, int(record[0]))


def test_a_rank_gets_a_termination_once(node: Node, until: Callable[..., None]) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    print('saving', flush=True); time.sleep(0.5); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "assert signal.getsignal(signal.SIGINT) == signal.default_int_handler\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    process = node.start(
        plan(TrainingSpec(entrypoint="train.py"), code_of(node, {"train.py": script}), nproc=2)
    )
    log = node.job() / "ranks" / "0.log"
    until(lambda: log.exists() and "ready" in log.read_text() and "ready" in node.rank_log(1))
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert node.rank_log(0) == "ready\nsaving\nsaved\n"
    assert node.rank_exit(0)[:2] == ["0", "exit"]


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv of util-linux")
def test_ranks_die_with_their_launcher_however_it_dies(node: Node, until: Callable[..., None]) -> None:
    script = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    process = node.start(
        plan(TrainingSpec(entrypoint="train.py"), code_of(node, {"train.py": script}), nproc=2)
    )
    until(
        lambda: all(
            (node.job() / "ranks" / f"{rank}.log").exists() and node.rank_log(rank) for rank in (0, 1)
        )
    )
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    until(lambda: node.processes() == [], timeout_s=10)


def test_setup_runs_in_one_shell_before_the_ranks(node: Node) -> None:
    code = code_of(node, {"train.py": "import os; print(os.environ['FROM_SETUP'], os.getcwd())"})
    (code / "sub").mkdir()
    setup = [
        "cd sub && pwd",
        "export FROM_SETUP=it\r\npwd",
        "cat <<'END'\n[[ here\nEND",
        "set -u; unset -v nothing",
    ]
    assert node.run(plan(TrainingSpec(entrypoint="train.py", setup=setup), code)) == 0, node.log()
    assert node.rank_log(0) == f"it {code}\n"
    assert f"{code}/sub\n" in node.log()
    assert f"\n{code}\n" in node.log(), "every command begins in the working directory"
    assert node.evidence(0, 0).setup.exit_code == 0


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("false", 1),
        ("echo why >&2; (exit 5)", 5),
        ("exit 3", 3),
        ("exit 0", 1),
        ("if then", 2),
        ("cat <<E\nx", 0),
    ],
)
@pytest.mark.parametrize("bash", [True, False])
def test_a_failed_setup_is_told_from_a_failed_training(
    node: Node, command: str, code: int, bash: bool
) -> None:
    folder = code_of(node, {"train.py": "print('trained')"})
    if not bash:
        (node.home / "bin").mkdir()
        (node.home / "bin" / "bash").symlink_to("/bin/dash")
    spec = TrainingSpec(entrypoint="train.py", setup=["true", command])
    exit_code = node.run(plan(spec, folder))
    found = diagnose([node.evidence(0, exit_code)])
    if code == 0:  # bash and dash take an unfinished here-document for complete
        assert exit_code == 0
        return
    assert exit_code == code
    assert not (node.job() / "ranks").exists()
    assert (found.cause, found.exit_code) == ("setup_failed", code)
    assert found.sentence.startswith(f"setup command 2 of 2 failed with exit code {code}")


def test_a_virtual_environment_that_the_setup_makes_is_used(node: Node) -> None:
    code = code_of(node, {"train.py": "import sys; print(sys.prefix)"})
    spec = TrainingSpec(
        entrypoint="train.py",
        launcher="python",
        setup=["python3 -m venv --without-pip .venv", "source .venv/bin/activate"],
    )
    assert node.run(plan(spec, code)) == 0, node.log()
    assert node.rank_log(0) == f"{code}/.venv\n"


def test_without_torch_the_box_is_not_ready_to_train(new_node: Callable[..., Node]) -> None:
    node = new_node(path=())
    code = code_of(node, {"train.py": ""})
    exit_code = node.run(plan(TrainingSpec(entrypoint="train.py"), code))
    found = diagnose([node.evidence(0, exit_code)])
    assert found.cause == "setup_failed"
    assert "has no torch" in found.sentence


def test_the_python_with_torch_is_found_beside_the_systems_own(new_node: Callable[..., Node]) -> None:
    node = new_node(path=())
    (node.home / "bin").mkdir()
    python = node.home / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={Path(__file__).with_name("standin")} exec "{BASE_PYTHON}" "$@"\n'
    )
    python.chmod(0o755)
    code = code_of(node, {"train.py": "import torch; print('found')"})
    assert node.run(plan(TrainingSpec(entrypoint="train.py"), code)) == 0, node.log()
    assert node.rank_log(0) == "found\n"


def test_users_files_cannot_break_the_launcher(node: Node) -> None:
    code = code_of(
        node,
        {"train.py": "print('ok')", "argparse.py": "raise SystemExit('shadowed')", "subprocess.py": "1/0"},
    )
    assert node.run(plan(TrainingSpec(entrypoint="train.py"), code)) == 0, node.log()


def test_several_nodes_meet_at_a_given_port(node: Node) -> None:
    code = code_of(node, {"see.py": SEE})
    spec = TrainingSpec(entrypoint="see.py", nodes=2, env={"NCCL_SOCKET_IFNAME": "ib0"})
    command = plan(spec, code, node=1, nodes=2, nproc=2, master_addr="127.0.0.1", master_port=23456)
    assert node.run(command) == 0, node.log()
    expected = (
        "--nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 23456 "
        "--rdzv-backend static --rdzv-conf timeout=1800"
    )
    assert f"stand-in torchrun: {expected}" in node.log()
    env = seen(code)["env"]
    assert env["GLOO_SOCKET_IFNAME"] == "lo", "found on the box: the interface that leads to node 0"
    assert env["NCCL_SOCKET_IFNAME"] == "ib0", "the user's own wins"
    assert [node.rank_exit(rank)[0] for rank in (2, 3)] == ["0", "0"]


def test_u09_the_raw_log_of_a_rank_is_whole(node: Node) -> None:
    raw = b"".join(b"\r\x1b[32m%3d%%\x1b[0m\x1b[A" % step for step in range(100)) + b"\xff\xe6\n"
    code = code_of(node, {"train.py": f"import sys; sys.stdout.buffer.write({raw!r})"})
    assert node.run(plan(TrainingSpec(entrypoint="train.py"), code, nproc=2)) == 0
    assert (node.job() / "ranks" / "1.log").read_bytes() == raw


def test_c51_values_of_env_are_in_no_file_and_no_argument(node: Node) -> None:
    spec = TrainingSpec(entrypoint="x.py", env={"HF_TOKEN": "hf_inventedA1"}, secrets=["OTHER"])
    command = plan(spec, Path("/x"))
    assert "hf_inventedA1" not in command.command + command.summary + repr(spec)
    assert not any(b"hf_inventedA1" in content for content in command.files.values())


def test_only_torchrun_on_several_nodes_needs_an_address() -> None:
    with pytest.raises(ValueError, match="port of node 0"):
        plan(TrainingSpec(entrypoint="x.py"), Path("/x"), nodes=2)


@pytest.mark.parametrize(
    ("spec", "summary"),
    [
        (
            {"entrypoint": "train.py", "args": ["a b"]},
            "torchrun --nproc-per-node=2 --standalone train.py 'a b'",
        ),
        ({"entrypoint": "-m a.b"}, "torchrun --nproc-per-node=2 --standalone -m a.b"),
        ({"entrypoint": "-m a.b", "launcher": "python"}, "python -m a.b"),
        ({"entrypoint": "x/train.sh", "args": "1 2"}, "bash train.sh 1 2"),
        ({"entrypoint": "make -j | tee x", "launcher": "command"}, "make -j | tee x"),
    ],
)
def test_the_summary_reads_as_a_person_would_type_it(spec: dict[str, Sequence[str]], summary: str) -> None:
    assert plan(TrainingSpec(**spec), Path("/x"), nproc=2).summary == summary


def test_shell_files_parse_in_every_shell() -> None:
    scripts = Path(sys.modules["gpu_flows.training.commands"].__file__).parent / "scripts"
    for script in scripts.glob("*.sh"):
        for shell in SHELLS:
            subprocess.run([*shell.split(), "-n", str(script)], check=True)

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_flows.training.rendezvous import NodesCannotMeet, check_nodes_meet, find_port
from tests.training.nodes import SCRIPTS
from tests.training.shell import LocalShell

NETWORK = SCRIPTS / "network.py"


def network(*words: str) -> str:
    return subprocess.run(
        [sys.executable, NETWORK, *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def test_c41_a_port_that_somebody_listens_on_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import network as module

    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            module.server(port)
        monkeypatch.setattr(module, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="is taken"):
            module.free_port()
    assert module.free_port() == port


def test_a_port_is_found_on_the_first_node(tmp_path: Path) -> None:
    port = asyncio.run(find_port(LocalShell(tmp_path), "127.0.0.1", timeout_s=30))
    assert 20000 <= port < 30000
    socket.create_server(("", port)).close()


def test_an_address_of_a_nat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NodesCannotMeet, match=r"node 0 is reached at 203\.0\.113\.7"):
        asyncio.run(find_port(LocalShell(tmp_path), "203.0.113.7", timeout_s=30))


def test_nodes_are_tried_both_ways(tmp_path: Path) -> None:
    nodes = [(LocalShell(tmp_path), f"127.0.0.{number}") for number in (1, 2, 3)]
    asyncio.run(check_nodes_meet(nodes, timeout_s=20))


def test_nodes_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    # TEST-NET-3: nobody is there.
    nodes = [(LocalShell(tmp_path), "127.0.0.1"), (LocalShell(tmp_path), "203.0.113.7")]
    with pytest.raises(NodesCannotMeet, match="node 0 does not reach node 1") as caught:
        asyncio.run(check_nodes_meet(nodes, timeout_s=2))
    assert "node 1 does not reach" not in str(caught.value)


def test_somebody_else_behind_a_port_is_not_taken_for_the_node() -> None:
    port = network("listen", "their nonce", "3", "1")
    assert network("dial", "ours", "0.5", f"127.0.0.1:{port}").endswith("somebody else answers there")
    assert network("dial", "their nonce", "2", f"127.0.0.1:{port}") == f"ok 127.0.0.1:{port}"


def test_the_interface_is_the_one_that_leads_there() -> None:
    assert network("interface", "127.0.0.2") == "lo"
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    default = next((line.split()[0] for line in routes if line.split()[1] == "00000000"), None)
    if default:
        assert network("interface", "192.0.2.1") in (default, *os.listdir("/sys/class/net"))


@pytest.mark.parametrize("file", ["scripts/network.py", "distributed.py"])
def test_what_is_shipped_runs_on_python_3_9(file: str) -> None:
    path = SCRIPTS.parent / file
    ast.parse(path.read_text(), feature_version=(3, 9))
    installed = [*Path.home().glob(".pyenv/versions/3.9*/bin/python3.9"), shutil.which("python3.9")]
    old = next((each for each in installed if each), None)
    if old is None:
        pytest.skip("there is no Python 3.9 to import it with")
    subprocess.run(
        [old, "-c", f"import runpy; runpy.run_path({str(path)!r}, run_name='x')"], check=True, env={}
    )

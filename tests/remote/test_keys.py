from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import traceback

import asyncssh
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_flows.remote.errors import BadKey
from gpu_flows.remote.keys import (
    derive_identity,
    identity_of,
    load_or_create_identity,
    normalise_private_key,
    read_private_key,
)

ED25519 = asyncssh.generate_private_key("ssh-ed25519")
RSA = asyncssh.generate_private_key("ssh-rsa", key_size=2048)
ECDSA = asyncssh.generate_private_key("ecdsa-sha2-nistp256")

TEXTS = {
    "rsa-pem": RSA.export_private_key("pkcs1-pem").decode(),
    "rsa-openssh": RSA.export_private_key("openssh").decode(),
    "rsa-pkcs8": RSA.export_private_key("pkcs8-pem").decode(),
    "ed25519-openssh": ED25519.export_private_key("openssh").decode(),
    "ed25519-pkcs8": ED25519.export_private_key("pkcs8-pem").decode(),
    "ecdsa-pem": ECDSA.export_private_key("pkcs1-pem").decode(),
}

DAMAGES = {
    "as it was": lambda text: text,
    "literal backslash n": lambda text: text.replace("\n", "\\n"),
    "literal backslash r n": lambda text: text.replace("\n", "\\r\\n"),
    "newlines to spaces": lambda text: text.replace("\n", " "),
    "one line": lambda text: text.replace("\n", ""),
    "indented": lambda text: textwrap.indent(text, "      "),
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "bom": lambda text: "\ufeff" + text,
    "quoted": lambda text: f'"{text.strip()}"',
    "no last newline": lambda text: text.rstrip("\n"),
    "comment before": lambda text: "my key:\n\n" + text,
}


def public(text):
    return asyncssh.import_private_key(text).export_public_key("openssh")


@pytest.mark.parametrize("kind", TEXTS)
def test_c29_every_format_is_read(kind):
    assert public(normalise_private_key(TEXTS[kind], "the field private_key")) == public(TEXTS[kind])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["rsa-pem", "ed25519-openssh"])
def test_c29_a_key_that_a_form_has_mangled_is_made_whole(kind, damage):
    whole = normalise_private_key(DAMAGES[damage](TEXTS[kind]), "the field private_key")
    assert public(whole) == public(TEXTS[kind])


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["ed25519-openssh", "ed25519-pkcs8", "ecdsa-pem"]),
    st.lists(st.sampled_from(sorted(DAMAGES)), max_size=3),
)
def test_c29_several_mishaps_at_once(kind, damages):
    text = TEXTS[kind]
    for damage in damages:
        text = DAMAGES[damage](text)
    assert public(normalise_private_key(text, "a field")) == public(TEXTS[kind])


@given(st.text(max_size=400))
def test_c29_whatever_is_no_key_is_a_bad_key(text):
    with pytest.raises(BadKey, match=r"^a field: "):
        normalise_private_key(text, "a field")


@pytest.mark.parametrize("kind", ["openssh", "pkcs8-pem"])
def test_c29_a_passphrase(kind):
    text = ED25519.export_private_key(kind, "open sesame", rounds=1000 if "pkcs8" in kind else 50).decode()
    with pytest.raises(BadKey, match=r"/keys/mine: this private key needs a passphrase"):
        normalise_private_key(text, "/keys/mine")
    with pytest.raises(BadKey, match=r"/keys/mine: the passphrase does not open"):
        normalise_private_key(text, "/keys/mine", passphrase="wrong")
    assert public(normalise_private_key(text, "/keys/mine", passphrase="open sesame")) == public(
        TEXTS["ed25519-openssh"]
    )


def test_c29_an_encrypted_legacy_pem_in_one_line():
    text = RSA.export_private_key("pkcs1-pem", "open sesame").decode().replace("\n", " ")
    with pytest.raises(BadKey, match="needs a passphrase"):
        normalise_private_key(text, "/keys/mine")
    assert public(normalise_private_key(text, "/keys/mine", passphrase="open sesame")) == public(
        TEXTS["rsa-pem"]
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (" \n ", "is empty"),
        ("hunter2", "not a private key"),
        # The key is new in each process, so it must not become a part of the test's name.
        pytest.param(
            ED25519.export_public_key("openssh").decode(), r"public key; .*without \.pub", id="public"
        ),
        (RSA.export_public_key("pkcs1-pem").decode(), "public key"),
        (RSA.export_public_key("pkcs8-pem").decode(), "public key"),
        (RSA.export_public_key("rfc4716").decode(), "public key"),
        (TEXTS["ed25519-openssh"][:120], "incomplete"),
        (TEXTS["ed25519-openssh"].replace("b3BlbnNz", "!!!!!!!!"), "damaged"),
        (TEXTS["ed25519-openssh"].replace("b3BlbnNz", ""), "cannot be read"),
        ("PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\n", "PuTTY.*puttygen"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "a certificate, not"),
    ],
)
def test_c29_what_is_wrong_is_said_with_the_source(text, reason):
    with pytest.raises(BadKey, match=rf"^the field private_key: .*{reason}"):
        normalise_private_key(text, "the field private_key")


def test_c29_no_content_of_a_key_shows_in_the_error():
    damaged = TEXTS["rsa-pem"].replace("\n", "", 3)[:-60] + "\n-----END RSA PRIVATE KEY-----\n"
    with pytest.raises(BadKey) as caught:
        normalise_private_key(damaged, "/keys/mine")
    shown = "".join(traceback.format_exception(caught.value))
    assert not [line for line in TEXTS["rsa-pem"].splitlines()[1:-1] if line[:20] in shown]


def test_c29_files(tmp_path):
    path = tmp_path / "id"
    path.write_text(TEXTS["ed25519-pkcs8"])
    assert public(read_private_key(path)) == public(TEXTS["ed25519-openssh"])
    with pytest.raises(BadKey, match=r"id_missing: there is no such private key file"):
        read_private_key(tmp_path / "id_missing")
    with pytest.raises(BadKey, match=r"cannot be read: Is a directory"):
        read_private_key(tmp_path)
    path.write_bytes(ED25519.export_private_key("pkcs8-der"))
    with pytest.raises(BadKey, match=rf"^{path}: "):
        read_private_key(path)


def test_a_derived_identity_is_the_same_everywhere_and_differs_by_name():
    one = derive_identity(b"an api key of the cloud", "team1", "runpod@default")
    assert one == derive_identity(b"an api key of the cloud", "team1", "runpod@default")
    assert one.public_key == (
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMys9CQf8Fq90n8hQqm3MqXGC326tIRGdpZJV+ZCUuwx"
    ), "the scheme has changed: boxes rented by the last release would lock us out"
    others = {
        derive_identity(b"an api key of the cloud", "team2", "runpod@default").public_key,
        derive_identity(b"an api key of the cloud", "team1", "runpod@other").public_key,
        derive_identity(b"another key of the cloud", "team1", "runpod@default").public_key,
        one.public_key,
    }
    assert len(others) == 4
    assert "PRIVATE" not in repr(one)
    assert public(one.private_key).decode().split()[:2] == one.public_key.split()
    with pytest.raises(BadKey, match="runpod@default is too short"):
        derive_identity(b"", "team1", "runpod@default")


def test_the_fingerprint_is_what_ssh_keygen_prints(tmp_path):
    identity = identity_of(TEXTS["ed25519-openssh"])
    (tmp_path / "id.pub").write_text(identity.public_key + "\n")
    try:
        printed = subprocess.run(["ssh-keygen", "-lf", tmp_path / "id.pub"], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("no ssh-keygen is installed")
    assert identity.fingerprint in printed.stdout.decode()


def test_an_identity_in_a_file_is_made_once(tmp_path):
    path = tmp_path / "config" / "id_local"
    code = (
        "import sys; from pathlib import Path; from gpu_flows.remote.keys import load_or_create_identity;"
        "print(load_or_create_identity(Path(sys.argv[1])).public_key)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) for _ in range(3)
    ]
    made = {process.communicate()[0].decode().strip() for process in started}
    assert made == {load_or_create_identity(path).public_key}
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["id_local"]

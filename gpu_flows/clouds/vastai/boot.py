"""What an instance runs when it starts: the key that may log in, and the dead-man."""

from __future__ import annotations

import re
import shlex

from gpu_flows.clouds.errors import NotOffered, RequestRefused, Scope

LONGEST_ONSTART = 4096
"""Characters that the create call takes for ``onstart``."""

_PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+( [^\n]*)?")


def onstart(public_key: str, boot_script: str) -> str:
    """Return the script for the create call.

    The key rides in it, so that one call is all it takes and nothing is left half done: no key has to be
    registered with the account, and none to be attached afterwards. An injected key has been seen to vanish
    hours later while the instance ran on; hence the loop, which puts it back.

    Args:
        public_key: One line in OpenSSH format.
        boot_script: The dead-man; empty for none.

    Raises:
        RequestRefused: When the key is none.
        NotOffered: When the script is longer than Vast.ai takes: it would refuse it with another reason (C49).
    """
    key = public_key.strip()
    if not _PUBLIC_KEY.fullmatch(key):
        raise RequestRefused("the SSH public key is not one line in OpenSSH format")
    lines = [
        "(",
        "umask 077",
        "h=${HOME:-/root}",
        'mkdir -p "$h/.ssh"',
        # Else every login lands in a tmux session of its own making.
        'touch "$h/.no_auto_tmux"',
        f"k={shlex.quote(key)}",
        'while :; do grep -qxF "$k" "$h/.ssh/authorized_keys" || printf \'\\n%s\\n\' "$k" >>"$h/.ssh/authorized_keys"',
        "sleep 5; done </dev/null >/dev/null 2>&1 &",
        ")",
    ]
    text = "\n".join(lines) + "\n" + boot_script
    if len(text) > LONGEST_ONSTART:
        raise NotOffered(
            f"the boot script has {len(text)} characters, and Vast.ai takes {LONGEST_ONSTART}",
            scope=Scope.CLOUD,
        )
    return text


def self_destruct(base_url: str) -> str:
    """Return POSIX sh by which an instance destroys itself.

    Its id and its own key are in the environment of process 1, and so in that of what it starts, but not in
    that of an SSH login. The key may destroy this one instance only; it goes to curl by stdin, where no
    ``ps`` shows it. Images without curl have Python: they train with it.

    Args:
        base_url: Of the API, without a trailing slash.
    """
    url = shlex.quote(f"{base_url}/api/v0/instances/")
    lines = [
        "e() { tr '\\0' '\\n' </proc/1/environ | sed -n \"s/^$1=//p\"; }",
        "i=${CONTAINER_ID:-$(e CONTAINER_ID)}",
        "export k=${CONTAINER_API_KEY:-$(e CONTAINER_API_KEY)}",
        # An empty id would address all instances.
        f'[ -n "$i" ] && u={url}$i/ && {{',
        'printf \'header="Authorization: Bearer %s"\' "$k" | curl -fsS -m 50 -X DELETE -K - "$u" ||',
        "python3 -c \"import os,sys,urllib.request as r;r.urlopen(r.Request(sys.argv[1],method='DELETE',"
        "headers={'Authorization':'Bearer '+os.environ['k']}),timeout=50)\" \"$u\"",
        "}",
    ]
    return "\n".join(lines)

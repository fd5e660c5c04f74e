"""One installation at work: its settings, the clouds it has opened, its keys, its connections to boxes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds import CloudRef, open_cloud
from gpu_flows.clouds.base import Box, Cloud
from gpu_flows.clouds.errors import AuthenticationFailed
from gpu_flows.errors import MissingExtra, SettingsError
from gpu_flows.leases.blocked import BlockedScopes
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import Owner, lease_id
from gpu_flows.leases.liveness import JournalLiveness, OwnerLiveness
from gpu_flows.progress import Listener, ignore
from gpu_flows.settings import Settings, ensure_namespace, load_settings

if TYPE_CHECKING:
    from gpu_flows.remote.keys import Identity
    from gpu_flows.remote.ssh import RemoteBox

_CLOSE_TIMEOUT_S = 15.0
_BLOCKED = BlockedScopes()
"""Shared by the runs of a process: what one of them learnt, the next need not pay for again."""


class Installation:
    """What the steps share: open clouds, keys, connections, and where things are remembered.

    Args:
        settings: The settings; read from file and environment unless given.
        cloud_options: Keyword arguments by which each cloud (``cloud@account``) is opened, over those of the
            settings; may hold secrets.
        liveness: Knows whether owners still want their boxes; this machine's journals unless given.
        makes_namespace: Make a namespace for this user where none is set, as the command line does.
        listener: Told what happens.
        clock: Time and sleep.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        cloud_options: Mapping[str, Mapping[str, Any]] | None = None,
        liveness: OwnerLiveness | None = None,
        makes_namespace: bool = False,
        listener: Listener = ignore,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = settings or load_settings()
        self.liveness = liveness or JournalLiveness(self.settings.journals)
        self.listener = listener
        self.clock = clock
        self.blocked = _BLOCKED
        self._makes_namespace = makes_namespace
        self._accounts = {str(CloudRef.parse(ref)): told for ref, told in self.settings.accounts.items()}
        # One that looks accounts up when they are asked for is empty, and false, until then.
        self._told = {} if cloud_options is None else cloud_options
        self._clouds: dict[str, Cloud] = {}
        self._identities: dict[tuple[str, str], tuple[Identity, ...]] = {}
        self._boxes: dict[tuple[str, str], RemoteBox] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection to a box."""
        with self._lock:
            boxes, self._boxes = list(self._boxes.values()), {}
        if boxes:
            from gpu_flows.remote.loop import blocking

            for box in boxes:
                blocking(box.close(), _CLOSE_TIMEOUT_S)

    def cloud(self, ref: str) -> Cloud:
        """Return an account of a cloud, opened once.

        Raises:
            BadRequest: When there is no such cloud.
            SettingsError: When the installation's settings do not allow it.
        """
        parsed = CloudRef.parse(ref)
        allowed = self.settings.enabled_clouds
        if allowed and parsed.cloud not in allowed and str(parsed) not in allowed:
            raise SettingsError(
                f"{parsed} is not enabled in this installation", hint=f"enabled are {', '.join(allowed)}"
            )
        with self._lock:
            if str(parsed) not in self._clouds:
                self._clouds[str(parsed)] = open_cloud(parsed, **self._opened_by(str(parsed)))
            return self._clouds[str(parsed)]

    def clouds(self, refs: Sequence[str]) -> list[Cloud]:
        """Return several accounts, in order."""
        return [self.cloud(ref) for ref in refs]

    def options(self, ref: str) -> dict[str, Any]:
        """Return the keyword arguments by which another process opens the same account."""
        return {"ref": ref, **self._opened_by(ref)}

    def _opened_by(self, ref: str) -> dict[str, Any]:
        """Return the arguments for one account; what looks them up elsewhere is asked only now."""
        return {**self._accounts.get(ref, {}), **self._told.get(ref, {})}

    def configured_clouds(self) -> list[str]:
        """Return every cloud of this installation: where a bare teardown and the reaper look.

        Those that the settings name; where they name none, those that this machine has credentials for.
        """
        from gpu_flows.clouds import CLOUDS

        told = list(dict.fromkeys([*self.settings.clouds, *self.settings.enabled_clouds]))
        return told or [ref for ref in CLOUDS if self._has_credentials(ref)]

    def _has_credentials(self, ref: str) -> bool:
        try:
            cloud = self.cloud(ref)
            if cloud.capabilities.namespace_required:
                cloud.identity_secrets()
        except (MissingExtra, AuthenticationFailed):
            return False
        # What cannot leave this machine needs none, and temporary ones are credentials too.
        return True

    def namespace(self, refs: Sequence[str]) -> str:
        """Return the namespace that boxes of these clouds carry.

        Raises:
            SettingsError: When none is set and other installations may share one of the accounts.
        """
        if self.settings.namespace:
            return self.settings.namespace
        needing = [ref for ref in refs if self.cloud(ref).capabilities.namespace_required]
        if needing and not self._makes_namespace:
            raise SettingsError(
                f"no namespace is set, so boxes on {', '.join(needing)} could not be told from another "
                "installation's",
                hint="set GPU_FLOWS_NAMESPACE or namespace in config.toml to 1-16 characters of a-z and 0-9",
            )
        return ensure_namespace()

    def journal(self, owner: Owner, namespace: str) -> Journal:
        """Return this machine's journal of an owner's lease."""
        return Journal(self.settings.journals, namespace, lease_id(owner, namespace), self.clock)

    def identity(self, cloud: Cloud, namespace: str) -> Identity:
        """Return the key pair that boxes of an account are made with.

        Raises:
            SettingsError: When the account has no static secret to derive one from, and no key is configured.
        """
        return self._identities_of(cloud, namespace)[0]

    def _identities_of(self, cloud: Cloud, namespace: str) -> tuple[Identity, ...]:
        """Return the key pairs by which boxes of an account may open: today's, and those of earlier secrets."""
        from gpu_flows.remote.keys import derive_identity, identity_of, read_private_key

        key = (f"{cloud.name}@{cloud.account}", namespace)
        with self._lock:
            if key not in self._identities:
                found = [derive_identity(s, namespace, cloud.account) for s in cloud.identity_secrets()]
                if not found and self.settings.ssh_key is not None:
                    found = [identity_of(read_private_key(self.settings.ssh_key))]
                if not found:
                    raise SettingsError(
                        f"the credentials of {cloud.name} are temporary, so no SSH key can be derived from them",
                        hint="set GPU_FLOWS_SSH_KEY, or ssh_key in config.toml, to the file of a private key",
                    )
                self._identities[key] = tuple(found)
            return self._identities[key]

    def remote(self, box: Box, namespace: str) -> RemoteBox:
        """Return the one connection to a box, made when it is first used.

        Args:
            box: A box that has an address.
            namespace: Whose key opens it.
        """
        from gpu_flows.clouds.base import ref_of
        from gpu_flows.remote.ssh import RemoteBox

        if box.endpoint is None:
            raise ValueError(f"box {box.id} has no address yet")
        cloud = self.cloud(box.ref)
        with self._lock:
            known = self._boxes.get((ref_of(cloud), box.id))
            if known is None or (known.endpoint.host, known.endpoint.port) != (
                box.endpoint.host,
                box.endpoint.port,
            ):
                first, *earlier = (one.private_key for one in self._identities_of(cloud, namespace))
                known = RemoteBox(box.endpoint, first, earlier_keys=earlier)
                self._boxes[(ref_of(cloud), box.id)] = known
            return known

    def run_folder(self, lease: str) -> Path:
        """Return the folder of a lease's logs and reports, made if need be."""
        folder = self.settings.logs / lease
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

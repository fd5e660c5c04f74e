"""The local cloud as the `Cloud` protocol wants it."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.errors import CloudError, NotOffered, RequestRefused
from gpu_flows.clouds.local.destroy import self_destruct_command
from gpu_flows.clouds.local.identity import identity_secret
from gpu_flows.clouds.local.registry import BOX_ID, BoxRecord, Registry, loopback_address, new_box_id
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.offers import Offer, OfferQuery

_NAME = re.compile(r"[a-z0-9-]{1,63}")
_PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+( [^\n]*)?\n?")
_log = logging.getLogger(__name__)

_INSTANCE_TYPE = "cpu"
_NEEDS_LINUX = "the local cloud needs Linux, for /proc and the addresses of its loopback device"


class LocalCloud:
    """Boxes on this machine: CPU only, free, each with an SSH endpoint on loopback and a home of its own.

    Args:
        account: Accounts are separate folders; one machine has as many as are named.
        root: Folder of the boxes; ``local`` in the installation's state folder unless given.
        usd_per_hour: What a box is said to cost, so that everything about prices can be tried.
        clock: Time and sleep.
    """

    name = "local"
    capabilities = Capabilities(
        multi_node=True,
        whole_machine=False,
        cpu=True,
        namespace_required=False,
        # Only where the maker is killed: then its box may be born a moment later.
        lag_s=2.0,
        ready_timeout_s=60.0,
    )

    def __init__(
        self,
        account: str = "default",
        *,
        root: str | Path | None = None,
        usd_per_hour: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        from gpu_flows.settings import state_folder

        folder = Path(root) if root else state_folder(os.environ) / "local"
        if account != "default":
            folder = folder.with_name(f"{folder.name}@{account}")
        self.account = account
        self._usd_per_hour = usd_per_hour
        self._clock = clock
        self.root = folder.absolute()
        self._registry = Registry(self.root, clock=clock)

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return this machine, for each alternative of the request that asks for processor cores."""
        offer = Offer(
            cloud=self.name,
            account=self.account,
            instance_type=_INSTANCE_TYPE,
            gpu=None,
            gpu_count=0,
            vcpus=_cores(),
            usd_per_hour=self._usd_per_hour,
            price_note="this machine",
        )
        asked = [(i, wanted) for i, wanted in enumerate(query.request.alternatives) if wanted.is_cpu]
        if not asked:
            return [replace(offer, unavailable="the local cloud has no GPUs: ask for cpu")]
        return [
            replace(offer, alternative=index, unavailable=self._obstacle(wanted.count, query.disk_gb))
            for index, wanted in asked
        ]

    def _obstacle(self, cores: int, disk_gb: int | None) -> str | None:
        if sys.platform != "linux":
            return _NEEDS_LINUX
        if cores > _cores():
            return f"{cores} processor cores are asked for, and this machine has {_cores()}"
        place = next(path for path in (self.root, *self.root.parents) if path.exists())
        free_gb = shutil.disk_usage(place).free / 1e9
        if disk_gb is not None and disk_gb > free_gb:
            return f"{disk_gb} GB of disk are asked for, and {free_gb:.0f} GB are free at {place}"
        return None

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        """Make one box, which exists when this returns and answers a moment later."""
        if sys.platform != "linux":
            raise NotOffered(_NEEDS_LINUX, hint="name another cloud; all others work from here")
        if importlib.util.find_spec("asyncssh") is None:
            raise NotOffered(
                "the local cloud needs asyncssh, which is not installed", hint="pip install asyncssh"
            )
        if offer.cloud != self.name or offer.instance_type != _INSTANCE_TYPE:
            raise RequestRefused(f"not an offer of the local cloud: {offer.cloud} {offer.instance_type}")
        if spec.image is not None:
            raise NotOffered(
                f"the local cloud boots no image, so not {spec.image} either",
                hint='name the image for the other clouds only: image={"runpod": ...}',
            )
        if not _NAME.fullmatch(spec.name):
            raise RequestRefused(f"not a name for a box: {spec.name!r}")
        if not _PUBLIC_KEY.fullmatch(spec.ssh_public_key):
            raise RequestRefused("the SSH public key is not one line in OpenSSH format")
        box_id = new_box_id()
        record = BoxRecord(
            id=box_id,
            name=spec.name,
            owner=spec.owner,
            created_at=self._clock.now().isoformat(),
            deadline=spec.deadline.isoformat(),
            address=loopback_address(box_id),
            usd_per_hour=offer.usd_per_hour,
        )
        self._registry.create(
            record, public_key=spec.ssh_public_key, boot_script=spec.boot_script, environment=spec.env
        )
        return self._box(record, BoxState.STARTING)

    def find(self, name_prefix: str) -> list[Box]:
        """Return every box whose name starts with the prefix."""
        try:
            self._registry.finish_ends()
        except CloudError:
            # It is listed below, and whoever wants it gone is told why it does not go.
            _log.debug("the end of a box could not be finished", exc_info=True)
        found = (self._now(r) for r in self._registry.records() if r.name.startswith(name_prefix))
        return [box for box in found if box.state is not BoxState.GONE]

    def describe(self, box: Box) -> Box:
        """Return the box as it is now."""
        box_id = self._own_id(box)
        record = self._registry.record(box_id)
        if record is not None:
            now = self._now(record)
            if now.state is not BoxState.GONE:
                return now
        ended_at = self._registry.ended_at(box_id)
        return replace(box, state=BoxState.GONE, state_reason="", endpoint=None, ended_at=ended_at)

    def destroy(self, box: Box) -> None:
        """End the box with every process and file of it; it is gone when this returns."""
        self._registry.end(self._own_id(box))

    def self_destruct(self, spec: BoxSpec) -> str | None:
        """Return one line of sh by which the box ends itself."""
        return self_destruct_command(self.root)

    def clock_skew_s(self) -> float | None:
        """Return 0: the cloud's clock is this machine's."""
        return 0.0

    def identity_secrets(self) -> tuple[bytes, ...]:
        """Return the secret from which SSH keys derive; it lies in a file that only this user can read."""
        return (identity_secret(self.root),)

    def console_url(self, box: Box) -> str | None:
        """Return None: there is no console."""
        return None

    def _own_id(self, box: Box) -> str:
        if box.cloud != self.name or not BOX_ID.fullmatch(box.id):
            raise RequestRefused(f"not a box of the local cloud: {box.cloud} {box.id!r}")
        return box.id

    def _now(self, record: BoxRecord) -> Box:
        state, reason, endpoint = self._registry.state(record.id)
        return replace(self._box(record, state, endpoint), state_reason=reason)

    def _box(self, record: BoxRecord, state: BoxState, endpoint: SshEndpoint | None = None) -> Box:
        return Box(
            cloud=self.name,
            account=self.account,
            id=record.id,
            name=record.name,
            state=state,
            usd_per_hour=record.usd_per_hour,
            endpoint=endpoint,
            private_address=endpoint.host if endpoint else record.address,
            created_at=datetime.fromisoformat(record.created_at),
            details={"owner": record.owner, "deadline": record.deadline},
        )


def _cores() -> int:
    # What this process may use, as nproc counts it on the box; cpu_count is the answer of other systems.
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

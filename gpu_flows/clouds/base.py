"""What every cloud must be able to do, and the plain values that travel to and from it.

A cloud adapter makes exactly one attempt per call, raises `gpu_flows.clouds.errors`, and knows nothing of
failover, leases, Airflow or Prefect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from gpu_flows.endpoint import SshEndpoint
from gpu_flows.offers import Offer, OfferQuery, account_ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a cloud can do; the feature table of the docs is computed from it.

    Attributes:
        spot: Rents interruptible boxes.
        multi_node: Boxes of one lease can reach each other on every port.
        cpu: Rents boxes without a GPU.
        native_timer: The cloud itself ends a box at a given time.
        self_destruct: A box can end its own billing with what it is given in the create call.
        whole_machine: The box is a machine or a container of its own, so that halting it harms nobody else.
        names_at_create: The create call carries our name; False only where the API has no field for it.
        idempotent_create: Repeating a create with the same nonce yields the same box.
        namespace_required: Several installations may share the account, so a namespace must be set.
        lag_s: How long a box may be missing from `find` after its create.
        ready_timeout_s: How long a box may take until it answers SSH, unless the user says otherwise.
        max_duration_s: The longest that a box may live; None for no limit.
    """

    spot: bool = False
    multi_node: bool = False
    cpu: bool = False
    native_timer: bool = False
    self_destruct: bool = True
    whole_machine: bool = True
    names_at_create: bool = True
    idempotent_create: bool = False
    namespace_required: bool = True
    lag_s: float = 60.0
    ready_timeout_s: float = 900.0
    max_duration_s: float | None = None


class BoxState(StrEnum):
    """Where a box is in its life. Everything but GONE may bill."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """Not running, but storage or more still bills: stopped is not destroyed."""
    FAILED = "failed"
    """The cloud says that it will never run."""
    ENDING = "ending"
    GONE = "gone"

    @property
    def may_serve(self) -> bool:
        """Whether a job runs or may still run there."""
        return self in (BoxState.STARTING, BoxState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    """What a create call has to carry.

    Attributes:
        name: The full lease name of the box; at most 63 characters of ``[a-z0-9-]``.
        nonce: The part of the name that is unique to this create; idempotency tokens derive from it.
        owner: The owner as a JSON list, for clouds that have room for it.
        ssh_public_key: One line in OpenSSH format.
        deadline: When the box must be gone, aware.
        boot_script: POSIX sh that the box runs at boot as its login user: the dead-man with the hard
            deadline. Empty only where the box cannot end its own billing.
        image: The image to boot; None for the cloud's default.
        disk_gb: Disk to ask for; None for the cloud's default.
        env: Environment of the box; never a secret.
    """

    name: str
    nonce: str
    owner: str
    ssh_public_key: str
    deadline: datetime
    boot_script: str = ""
    image: str | None = None
    disk_gb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One rented machine as its cloud describes it.

    Attributes:
        cloud: Name of the cloud.
        account: Account it is rented by; "default" unless one was named.
        region: The cloud's region; empty where it has none.
        id: The cloud's own id; never empty.
        name: The name, label or tag it carries; empty where it carries none.
        state: Where it is in its life.
        state_reason: The cloud's own words on the state.
        usd_per_hour: Dollars per hour for the whole box as billed; None when the cloud does not say.
        endpoint: Where it answers SSH; None while it has no address.
        private_address: Address by which boxes of the same lease reach it.
        gpu: Catalog name of its GPUs; None without GPUs or when the cloud does not say.
        gpu_count: Number of GPUs rented.
        spot: Whether it can be interrupted.
        created_at: Aware; the cloud's own time.
        ended_at: Aware; when it stopped billing, where the cloud tells.
        details: More of the cloud's own data, plain JSON.
    """

    cloud: str
    id: str
    name: str
    state: BoxState
    account: str = "default"
    region: str = ""
    zone: str | None = None
    state_reason: str = ""
    usd_per_hour: float | None = None
    endpoint: SshEndpoint | None = None
    private_address: str | None = None
    gpu: str | None = None
    gpu_count: int = 0
    spot: bool = False
    created_at: datetime | None = None
    ended_at: datetime | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError(
                f"a box of {self.cloud} without an id: an empty id must never be sent to a cloud"
            )

    @property
    def ref(self) -> str:
        """The account that rents it out, as users write it: ``cloud``, or ``cloud@account``."""
        return account_ref(self.cloud, self.account)

    def to_json(self) -> dict[str, Any]:
        """Return the box as plain JSON values; it holds no secret."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["state"] = self.state.value
        data["endpoint"] = self.endpoint.to_json() if self.endpoint else None
        data["details"] = dict(self.details)
        for key in ("created_at", "ended_at"):
            data[key] = data[key].isoformat() if data[key] else None
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Box:
        """Rebuild a box from what `to_json` returned."""
        values = dict(data)
        values["state"] = BoxState(values["state"])
        values["endpoint"] = SshEndpoint.from_json(values["endpoint"]) if values["endpoint"] else None
        for key in ("created_at", "ended_at"):
            values[key] = datetime.fromisoformat(values[key]) if values[key] else None
        return cls(**values)


@runtime_checkable
class Cloud(Protocol):
    """One account of one cloud.

    Every method makes one attempt, has a deadline of its own, is safe to call from several threads, and
    raises a `CloudError`. An answer that cannot be understood is an `UnexpectedAnswer`, never an empty
    result.
    """

    name: str
    account: str
    capabilities: Capabilities

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return what can be rented now, unavailable shapes included with their reason."""
        ...

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        """Rent one box: exactly one attempt, never repeated inside.

        Raises:
            CloudError: With ``ambiguous`` set wherever the box may exist all the same.
        """
        ...

    def find(self, name_prefix: str) -> list[Box]:
        """Return every box, in every state that bills, whose name starts with the prefix.

        Raises:
            UnexpectedAnswer: When the listing is not one; the caller must not take it for empty.
        """
        ...

    def describe(self, box: Box) -> Box:
        """Return the box as it is now; state GONE when the cloud no longer knows it."""
        ...

    def destroy(self, box: Box) -> None:
        """Ask for the box to be destroyed, whatever its state; one that is gone already is fine."""
        ...

    def self_destruct(self, spec: BoxSpec) -> str | None:
        """Return POSIX sh by which the box ends its own billing, or None where it cannot."""
        ...

    def clock_skew_s(self) -> float | None:
        """Return the cloud's clock less ours in seconds, as its last answer told; None if it never did."""
        ...

    def identity_secrets(self) -> tuple[bytes, ...]:
        """Return static secrets of the account, the current one first, from which SSH keys are derived.

        Empty where the credentials are temporary: then a configured key is needed.
        """
        ...

    def console_url(self, box: Box) -> str | None:
        """Return where a person can look at the box, or None."""
        ...


def ref_of(cloud: Cloud) -> str:
    """Return how users name this account of this cloud: ``cloud``, or ``cloud@account``."""
    return account_ref(cloud.name, cloud.account)

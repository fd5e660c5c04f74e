"""DigitalOcean as the `Cloud` protocol wants it."""

from __future__ import annotations

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds._credentials import no_credentials, previous_secret, secret_from_environment
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.digitalocean.boot import self_destruct_text, user_data
from gpu_flows.clouds.digitalocean.client import PydoApi
from gpu_flows.clouds.digitalocean.failures import is_absence
from gpu_flows.clouds.digitalocean.sizes import offers_of, refuse_other_counts
from gpu_flows.clouds.errors import CloudError, NotOffered, RequestRefused, UnexpectedAnswer
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.catalog import from_cloud_id
from gpu_flows.offers import Offer, OfferQuery

API = "https://api.digitalocean.com"
METADATA = "http://169.254.169.254"
"""Where a droplet learns its own id."""

_VARIABLES = ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN", "DO_API_TOKEN")
_PER_PAGE = 200
_MOST_PAGES = 100
_LONGEST_USER_DATA = 65536
_TAG = "gpu-flows"

_STATES = {
    "new": (BoxState.STARTING, ""),
    "active": (BoxState.RUNNING, ""),
    "off": (BoxState.STOPPED, "powered off, and billed all the same"),
    "archive": (BoxState.STOPPED, "archived"),
}


class DigitalOceanCloud:
    """DigitalOcean: GPU droplets with 1 or 8 NVIDIA or AMD cards, billed by the second until they are destroyed.

    Source: the API's published specification, and pydo.

    Args:
        account: ``default``, or what stands after the ``@``.
        token: The API token; from the environment unless given.
        token_on_box: A token by which a droplet may destroy itself, and with it any other one of the account: it
            lies on the droplet, where the job can read it. One that may do nothing but delete droplets will do.
            None for droplets that cannot end themselves.
        base_url: Of the API.
        metadata_url: Of the service by which a droplet learns its own id.
        ssh_port: Where the image's SSH server listens.
        clock: Time and sleep.
    """

    name = "digitalocean"
    capabilities = Capabilities(multi_node=True, self_destruct=False)

    def __init__(
        self,
        account: str = "default",
        *,
        token: str | None = None,
        token_on_box: str | None = None,
        base_url: str = API,
        metadata_url: str = METADATA,
        ssh_port: int = 22,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.account = account
        self.capabilities = replace(type(self).capabilities, self_destruct=token_on_box is not None)
        self._token = token
        self._token_on_box = token_on_box
        self._base_url = base_url.rstrip("/")
        self._metadata_url = metadata_url.rstrip("/")
        self._ssh_port = ssh_port
        self._clock = clock
        self._api: PydoApi | None = None
        self._keys: dict[str, int] = {}
        self._lock = threading.RLock()

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return every size with GPUs in every region that has it."""
        if query.request.is_cpu:
            return []
        refuse_other_counts(query.request)
        rows = [row for page in self._pages("sizes.list", "sizes") for row in page]
        return offers_of(rows, query, account=self.account)

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        """Make one droplet; it is billed from the answer on."""
        if spec.env:
            raise NotOffered("a droplet has no environment of its own", hint="pass env= to the job instead")
        body: dict[str, Any] = {
            "name": spec.name,
            "region": offer.region,
            "size": offer.instance_type,
            "image": _image(offer, spec),
            "ssh_keys": [self._key(spec)],
            "tags": [_TAG, _tag_of(spec.name)],
        }
        if self._token_on_box is not None:
            body["user_data"] = user_data(self._token_on_box, spec.boot_script)
            if len(body["user_data"].encode()) > _LONGEST_USER_DATA:
                raise RequestRefused("the user data of a droplet is at most 64 KiB")
        answer = self._client().call("droplets.create", body=body)
        return self._box(_part(answer.body, "droplet", dict))

    def find(self, name_prefix: str) -> list[Box]:
        """Return every droplet, in every state, whose name starts with the prefix."""
        # Without a type the listing leaves droplets with GPUs out. Tags are for people: they can be taken off.
        pages = self._pages("droplets.list", "droplets", type="gpus")
        boxes = [self._box(row) for page in pages for row in page]
        return [box for box in boxes if box.name.startswith(name_prefix)]

    def describe(self, box: Box) -> Box:
        """Return the droplet as it is now."""
        answer = self._client().read("droplets.get", self._id(box), accept=(404,))
        if answer.status == 404:
            if not is_absence(answer.body):
                raise UnexpectedAnswer(f"digitalocean answered a droplet with {answer.text[:200]!r}")
            return replace(box, state=BoxState.GONE, state_reason="", endpoint=None)
        return self._box(_part(answer.body, "droplet", dict))

    def destroy(self, box: Box) -> None:
        """Destroy the droplet with its disks; one that is gone already is fine."""
        answer = self._client().call("droplets.destroy", self._id(box), accept=(404,))
        if answer.status == 404 and not is_absence(answer.body):
            raise UnexpectedAnswer(f"digitalocean answered a delete with {answer.text[:200]!r}")

    def self_destruct(self, spec: BoxSpec) -> str | None:
        """Return sh by which a droplet destroys itself; None unless a token for it may lie there."""
        if self._token_on_box is None:
            return None
        return self_destruct_text(api=self._base_url, metadata=self._metadata_url)

    def clock_skew_s(self) -> float | None:
        """Return the cloud's clock less ours, from the Date header of its last answer."""
        return self._api.skew_s if self._api else None

    def identity_secrets(self) -> tuple[bytes, ...]:
        """Return the token, and the one before it where that is still known."""
        previous = previous_secret(*_VARIABLES, account=self.account)
        return tuple(secret.encode() for secret in (self._secret(), previous) if secret)

    def console_url(self, box: Box) -> str | None:
        """Return the droplet's page."""
        return f"https://cloud.digitalocean.com/droplets/{box.id}"

    def _client(self) -> PydoApi:
        with self._lock:
            if self._api is None:
                self._api = PydoApi(
                    self._secret(), self._base_url, secrets=[self._token_on_box or ""], clock=self._clock
                )
            return self._api

    def _secret(self) -> str:
        token = self._token or secret_from_environment(*_VARIABLES, account=self.account)
        if token is None:
            raise no_credentials(self.name, *_VARIABLES, account=self.account)
        return token

    def _id(self, box: Box) -> int:
        if box.cloud != self.name or not box.id.isdecimal():
            raise RequestRefused(f"not a droplet of DigitalOcean: {box.cloud} {box.id!r}")
        return int(box.id)

    def _key(self, spec: BoxSpec) -> int:
        """Return the id of the SSH key in the account, where it is registered first if need be."""
        blob = spec.ssh_public_key.split()[1]
        with self._lock:
            if blob not in self._keys:
                self._keys[blob] = self._registered(blob, spec)
            return self._keys[blob]

    def _registered(self, blob: str, spec: BoxSpec) -> int:
        # DigitalOcean's own fingerprint of a key is its MD5.
        digest = hashlib.md5(b64decode(blob), usedforsecurity=False).hexdigest()
        fingerprint = ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))
        try:
            found = self._client().read("ssh_keys.get", fingerprint, accept=(404,))
            if found.status == 404:
                body = {"name": _tag_of(spec.name), "public_key": spec.ssh_public_key.strip()}
                found = self._client().call("ssh_keys.create", body=body, accept=(422,))
            if found.status == 422:  # somebody else has registered it meanwhile
                found = self._client().read("ssh_keys.get", fingerprint)
            return int(_part(_part(found.body, "ssh_key", dict), "id", int))
        except CloudError as error:
            error.ambiguous = False  # no droplet has been asked for yet
            raise

    def _pages(self, operation: str, key: str, **options: Any) -> Iterator[list[Any]]:
        for page in range(1, _MOST_PAGES + 1):
            answer = self._client().read(operation, per_page=_PER_PAGE, page=page, **options)
            yield _part(answer.body, key, list)
            links = answer.body.get("links") or {}
            if not (links.get("pages") or {}).get("next"):
                return
        raise UnexpectedAnswer(f"digitalocean lists {key} on more than {_MOST_PAGES} pages")

    def _box(self, row: Any) -> Box:
        try:
            # A word that nobody knows says nothing of its end: it may serve.
            state, reason = _STATES.get(row["status"], (BoxState.STARTING, str(row["status"])))
            address = _address(row, "public")
            size = row["size"]
            info = row.get("gpu_info") or size.get("gpu_info")
            count, gpu = _cards(info)
            return Box(
                cloud=self.name,
                account=self.account,
                id=str(int(row["id"])),
                name=row["name"],
                state=state,
                state_reason=reason,
                region=row["region"]["slug"],
                usd_per_hour=float(size["price_hourly"]),
                endpoint=SshEndpoint(address, self._ssh_port) if address else None,
                private_address=_address(row, "private"),
                gpu=gpu,
                gpu_count=count,
                created_at=datetime.fromisoformat(row["created_at"]),
                details={"size": row["size_slug"]},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnexpectedAnswer(
                f"digitalocean answered with something that is no droplet: {json.dumps(row)[:200]} "
                f"({type(error).__name__}: {error})"
            ) from error


def _part(body: Any, key: str, kind: type) -> Any:
    """Return a part of an answer, which is never taken for empty where it is missing."""
    part = body.get(key) if isinstance(body, dict) else None
    if not isinstance(part, kind):
        raise UnexpectedAnswer(f"digitalocean answered without {key}: {json.dumps(body)[:200]}")
    return part


def _image(offer: Offer, spec: BoxSpec) -> str | int:
    """Return the image: DigitalOcean's own for the card and the number of cards, unless one is asked for."""
    if spec.image:
        return int(spec.image) if spec.image.isdecimal() else spec.image
    if offer.details.get("architecture") == "rocm":
        return "gpu-amd-base"
    return "gpu-h100x8-base" if offer.gpu_count == 8 else "gpu-h100x1-base"


def _tag_of(name: str) -> str:
    """Return the tag of an installation: how the names of all its boxes begin."""
    return f"{_TAG}:{'-'.join(name.split('-')[:2])}"


def _cards(info: Any) -> tuple[int, str | None]:
    if not info:
        return 0, None
    variant = from_cloud_id("digitalocean", info["model"])
    return int(info["count"]), variant.name if variant else str(info["model"])


def _address(row: Any, kind: str) -> str | None:
    found = (each["ip_address"] for each in row["networks"].get("v4", ()) if each["type"] == kind)
    return next(found, None)

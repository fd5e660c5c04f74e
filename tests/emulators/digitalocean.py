"""DigitalOcean's API: sizes, droplets, keys, and the metadata that a droplet reads its own id from."""

from __future__ import annotations

import hashlib
import itertools
import json
from base64 import b64decode
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from .cards import environment_with
from .forward import Forwarder, free_port
from .http import HttpEmulator, Reply, Request, Row
from .spec import Spec, SpecChecked, folder

TOKEN = "dop_v1_invented0000000000000000000000"
DELETES_ONLY = "dop_v1_invented_for_deleting_droplets"
METADATA = "http://169.254.169.254"


def size(
    slug: str, model: str, count: int, vram_gib: int, price: float, regions: list[str]
) -> dict[str, Any]:
    """Return a size as the API lists it; the memory is that of all its cards."""
    return {
        "slug": slug,
        "memory": 245760 * count,
        "vcpus": 20 * count,
        "disk": 720 if count == 1 else 2046,
        "transfer": 15.0,
        "price_monthly": round(price * 744, 2),
        "price_hourly": price,
        "regions": regions,
        "available": True,
        "description": f"{model.rpartition('_')[2].upper()} GPU - {count}X",
        "gpu_info": {"count": count, "model": model, "vram": {"amount": vram_gib, "unit": "gib"}},
    }


CPU_SIZE = {
    **{
        k: v for k, v in size("s-1vcpu-1gb", "none_basic", 1, 0, 0.00893, ["nyc1"]).items() if k != "gpu_info"
    },
    "memory": 1024,
}


def refusal(message: str, **attributes: Any) -> dict[str, Any]:
    """Return the body of a 422."""
    body: dict[str, Any] = {"id": "unprocessable_entity", "message": message}
    return {**body, "error_attributes": attributes} if attributes else body


NOT_FOUND = Reply(404, {"id": "not_found", "message": "The resource you were accessing could not be found."})


class DigitalOceanEmulator(SpecChecked, HttpEmulator):
    """One account of DigitalOcean.

    Attributes:
        sizes: What is listed.
        keys: Registered SSH keys, by fingerprint.
        droplet_limit: How many droplets the account may have.
        per_page: Most rows of a page, whatever is asked for.
        ssh_port: Where the boxes behind the droplets listen.
        starting: Ids of droplets that stay ``new``.
        programs: Folder for what stands in for nvidia-smi on the boxes; None for boxes that show no cards.
    """

    spec_file = "digitalocean-subset.json"
    spec_judges = staticmethod(lambda request: request.path.startswith("/v2/"))

    def __init__(self, backing: Path | None = None, **options: Any) -> None:
        super().__init__(backing, **options)
        self._spec = _corrected_spec()
        self.sizes: list[dict[str, Any]] = [
            CPU_SIZE,
            size("gpu-h100x1-80gb", "nvidia_h100", 1, 80, 3.39, ["tor1"]),
            size("gpu-h100x8-640gb", "nvidia_h100", 8, 640, 23.92, ["nyc2", "tor1"]),
            size("gpu-l40sx1-48gb", "nvidia_l40s", 1, 48, 1.57, []),
            size("gpu-mi300x1-192gb", "amd_mi300x", 1, 192, 1.99, ["atl1"]),
            size("gpu-mi300x8-1536gb", "amd_mi300x", 8, 1536, 15.92, ["atl1"]),
            size("gpu-h100x8-640gb-spot", "nvidia_h100", 8, 640, 9.0, ["nyc2"]),
            size("gpu-h100x8-640gb-contracted", "nvidia_h100", 8, 640, 20.0, ["nyc2"]),
            size("gpu-mi300x8-1536gb-fabric-contracted", "amd_mi300x", 8, 1536, 12.0, ["atl1"]),
            size("gpu-mi300x1-192gb-devcloud", "amd_mi300x", 1, 192, 1.99, ["atl1"]),
        ]
        self.keys: dict[str, dict[str, Any]] = {}
        self.droplet_limit = 25
        self.per_page = 200
        self.ssh_port = free_port()
        self.starting: set[str] = set()
        self.programs: Path | None = None
        self._numbers = itertools.count(400_000_001)
        self._key_ids = itertools.count(512_001)
        self._forwarders: dict[str, Forwarder] = {}
        droplet, key = r"/v2/droplets/(?P<id>\d+)", r"/v2/account/keys/(?P<key>[^/]+)"
        self.route("GET", "/v2/sizes", "sizes", self._authorised(self._list_sizes))
        self.route("GET", "/v2/droplets", "list", self._authorised(self._list))
        self.route("POST", "/v2/droplets", "create", self._authorised(self._create))
        self.route("GET", droplet, "get", self._authorised(self._get))
        self.route("DELETE", droplet, "delete", self._authorised(self._delete, also=DELETES_ONLY))
        self.route("POST", "/v2/account/keys", "add_key", self._authorised(self._add_key))
        self.route("GET", key, "get_key", self._authorised(self._get_key))
        # Every droplet sees the metadata service at one address, and itself in it.
        self.route(
            "GET", r"/boxes/(?P<id>\d+)/metadata/v1/id", "metadata", lambda r: Reply(200, r.match["id"])
        )

    def __exit__(self, *error: Any) -> None:
        for forwarder in self._forwarders.values():
            forwarder.close()
        super().__exit__(*error)

    def foreign(self, name: str, **data: Any) -> Row:
        """Put a droplet of somebody else into the account."""
        shape = {"size": self.sizes[1], "region": "tor1", "tags": [], **data}
        return self.begin(
            Row(id=str(next(self._numbers)), name=name, state="active", foreign=True, data=shape)
        )

    def as_seen_by(self, row_id: str, script: str) -> str:
        """Return sh as it works on a droplet, where the metadata service answers."""
        return script.replace(METADATA, f"{self.url}/boxes/{row_id}")

    def _authorised(self, handler: Any, *, also: str = TOKEN) -> Any:
        def authorised(request: Request) -> Reply:
            if request.headers.get("authorization") not in (f"Bearer {TOKEN}", f"Bearer {also}"):
                return Reply(401, {"id": "Unauthorized", "message": "Unable to authenticate you"})
            return handler(request)

        return authorised

    # Handlers

    def _list_sizes(self, request: Request) -> Reply:
        return self._page(request, "sizes", self.sizes)

    def _list(self, request: Request) -> Reply:
        rows = self.listed()
        if tag := request.query.get("tag_name"):
            rows = [row for row in rows if tag in row.data["tags"]]
        else:
            wants_gpus = request.query.get("type") == "gpus"
            rows = [row for row in rows if ("gpu_info" in row.data["size"]) is wants_gpus]
        return self._page(request, "droplets", [self._droplet(row) for row in rows])

    def _page(self, request: Request, key: str, rows: list[Any]) -> Reply:
        per_page = min(int(request.query.get("per_page", 20)), self.per_page)
        page = int(request.query.get("page", 1))
        pages: dict[str, str] = {}
        if page * per_page < len(rows):
            pages = {"next": f"{self.url}{request.path}?page={page + 1}", "last": "…"}
        shown = rows[(page - 1) * per_page : page * per_page]
        return Reply(200, {key: shown, "links": {"pages": pages}, "meta": {"total": len(rows)}})

    def _create(self, request: Request) -> Reply:
        body = request.body
        shape = next((each for each in self.sizes if each["slug"] == body["size"]), None)
        if shape is None:
            return Reply(422, refusal("You specified an invalid size for Droplet creation."))
        if not isinstance(body["image"], int) and not body["image"].startswith("gpu-"):
            return Reply(422, refusal("You specified an invalid image for Droplet creation."))
        keys = {key["id"]: key for key in self.keys.values()}
        if not body["ssh_keys"] or any(key not in keys for key in body["ssh_keys"]):
            return Reply(
                422, refusal(f"{body['ssh_keys']} are invalid key identifiers for Droplet creation.")
            )
        if len(self.live()) >= self.droplet_limit:
            return Reply(422, refusal("creating this/these droplet(s) will exceed your droplet limit"))
        if shape["regions"] and body["region"] not in shape["regions"]:
            return Reply(422, refusal("Size is not available in this region."))
        row = self.begin(
            Row(
                id=str(next(self._numbers)),
                name=body["name"],
                usd_per_hour=shape["price_hourly"],
                state="new",
                data={"size": shape, "region": body["region"], "tags": body.get("tags", []), "body": body},
            )
        )
        self.back(
            row,
            public_key=keys[body["ssh_keys"][0]]["public_key"],
            boot_script=self.as_seen_by(row.id, _bootcmd(body.get("user_data", ""))),
            environment=self._cards(row),
        )
        action = {"id": 7515, "rel": "create", "href": f"{self.url}/v2/actions/7515"}
        return Reply(202, {"droplet": self._droplet(row), "links": {"actions": [action]}})

    def _cards(self, row: Row) -> dict[str, str]:
        info = row.data["size"]["gpu_info"]
        return environment_with(self.programs / row.id, info["model"], info["count"]) if self.programs else {}

    def _get(self, request: Request) -> Reply:
        row = self.book.get(request.match["id"])
        if row is None or row.ended_at is not None:
            return NOT_FOUND
        if row.state == "new" and row.id not in self.starting:
            row.state = "active" if self._address(row) else "new"
        return Reply(200, {"droplet": self._droplet(row)})

    def _delete(self, request: Request) -> Reply:
        row = self.book.get(request.match["id"])
        if row is None or row.ended_at is not None:
            return NOT_FOUND
        self.end(row)
        return Reply(204)

    def _add_key(self, request: Request) -> Reply:
        text = request.body["public_key"]
        digest = hashlib.md5(b64decode(text.split()[1])).hexdigest()
        fingerprint = ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))
        with self.lock:
            if fingerprint in self.keys:
                return Reply(422, refusal("SSH Key is already in use on your account"))
            key = {"id": next(self._key_ids), "fingerprint": fingerprint, **request.body}
            self.keys[fingerprint] = key
        return Reply(201, {"ssh_key": key})

    def _get_key(self, request: Request) -> Reply:
        key = self.keys.get(unquote(request.match["key"]))
        return Reply(200, {"ssh_key": key}) if key else NOT_FOUND

    def _address(self, row: Row) -> str | None:
        if row.local_id is None:
            return f"192.0.2.{int(row.id) % 250 + 1}"
        endpoint = self.endpoint(row)
        if endpoint is None:
            return None
        with self.lock:
            if row.id not in self._forwarders:
                self._forwarders[row.id] = Forwarder(endpoint, self.ssh_port)
        return endpoint.host

    def _droplet(self, row: Row) -> dict[str, Any]:
        shape, region, body = row.data["size"], row.data["region"], row.data.get("body", {})
        address = None if row.state == "new" else self._address(row)
        networks = [
            {"ip_address": address, "netmask": "255.255.240.0", "gateway": "192.0.2.1", "type": kind}
            for kind in ("private", "public")
            if address
        ]
        gpu_info = {"gpu_info": shape["gpu_info"]} if "gpu_info" in shape else {}
        return {
            "id": int(row.id),
            "name": row.name,
            "memory": shape["memory"],
            "vcpus": shape["vcpus"],
            "disk": shape["disk"],
            "locked": row.state == "new",
            "status": row.state,
            "created_at": row.began_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "features": [],
            "backup_ids": [],
            "next_backup_window": None,
            "snapshot_ids": [],
            "image": {"id": 1, "name": str(body.get("image", "")), "distribution": "Ubuntu", "public": True},
            "volume_ids": [],
            "size": shape,
            "size_slug": shape["slug"],
            "networks": {"v4": networks, "v6": []},
            "region": {"name": region, "slug": region, "features": [], "available": True, "sizes": []},
            "tags": row.data["tags"],
            **gpu_info,
        }


def _bootcmd(user_data: str) -> str:
    """Return what cloud-init would run at every boot: JSON is YAML."""
    first, _, rest = user_data.partition("\n")
    if not first:
        return ""
    assert first == "#cloud-config", first
    return "\n".join(json.loads(rest)["bootcmd"])


@cache
def _corrected_spec() -> Spec | None:
    """Return the published specification with the errors put right by which it contradicts itself or the API."""
    where = folder()
    if where is None or not (where / DigitalOceanEmulator.spec_file).is_file():
        return None
    return Spec(_corrected(json.loads((where / DigitalOceanEmulator.spec_file).read_text("utf-8"))))


def _corrected(node: Any) -> Any:
    if isinstance(node, list):
        return [_corrected(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {key: _corrected(value) for key, value in node.items()}
    if node.get("enum") == ["new", "active", False, "archive"]:
        node["enum"] = ["new", "active", "off", "archive"]  # YAML reads off as false
    if isinstance(node.get("required"), list) and "description" in node["required"]:
        node["properties"]["description"] = {"type": "string"}  # required of a size, and not described
    if "next_backup_window" in node.get("properties", {}):
        node["properties"]["next_backup_window"]["nullable"] = True  # no backups, no window
    if any(each.get("title") == "Single Droplet Response" for each in node.get("oneOf", ())):
        node["anyOf"] = node.pop("oneOf")  # no property of either is required, so that both fit
    return node

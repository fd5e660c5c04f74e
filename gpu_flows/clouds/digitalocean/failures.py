"""What DigitalOcean's failures mean, as data; the first match wins.

Source: the API's documentation and public reports of its answers (a 422 has no machine-readable cause).
"""

from __future__ import annotations

from typing import Any

from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    QuotaExceeded,
    RateLimited,
    RequestRefused,
    Scope,
    Verdict,
)

_SCOPES = "the token needs the scopes that docs/clouds/digitalocean.md lists"

VERDICTS = (
    Verdict(AuthenticationFailed, status=401, hint="the token is wrong, has expired, or was revoked"),
    Verdict(AuthenticationFailed, status=403, hint=_SCOPES),
    Verdict(RateLimited, status=429),
    Verdict(
        QuotaExceeded,
        status=422,
        contains="exceed your droplet limit",
        scope=Scope.CLOUD,
        hint="ask DigitalOcean to raise the limit, or destroy droplets that nobody needs",
    ),
    Verdict(CapacityUnavailable, status=422, contains="size is not available in this region"),
    Verdict(CapacityUnavailable, status=422, contains="region is not available", scope=Scope.REGION),
    Verdict(CapacityUnavailable, status=422, contains="size is unavailable"),
    Verdict(CapacityUnavailable, status=422, contains="temporarily unavailable"),
    Verdict(RequestRefused, status=422, contains="invalid size"),
    Verdict(RequestRefused, status=422, contains="invalid region"),
    Verdict(RequestRefused, status=422, contains="invalid image", hint="name a slug or the id of an image"),
    Verdict(RequestRefused, status=422, contains="invalid key"),
)


def error_code(body: Any) -> str | None:
    """Return the code of an error's body; a 422 has the same one whatever is wrong."""
    code = body.get("id") if isinstance(body, dict) else None
    return code if isinstance(code, str) else None


def available_regions(body: Any) -> list[str]:
    """Return the regions that a refusal for want of capacity names as having some."""
    attributes = body.get("error_attributes") if isinstance(body, dict) else None
    regions = attributes.get("available_regions") if isinstance(attributes, dict) else None
    return [region for region in regions if isinstance(region, str)] if isinstance(regions, list) else []


def is_absence(body: Any) -> bool:
    """Tell whether the body of a 404 is DigitalOcean's own word that something does not exist."""
    return error_code(body) == "not_found"

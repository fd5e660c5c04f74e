"""What the failures of AWS mean, as a table, and how boto3's exceptions become errors of the clouds.

Sources: the EC2 API reference, "Error codes for the Amazon EC2 API"; botocore's exceptions. Codes are stems:
variants with a suffix occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    BoxLost,
    CapacityUnavailable,
    CloudError,
    CloudUnreachable,
    NotOffered,
    QuotaExceeded,
    RateLimited,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
    Verdict,
    verdict_of,
)

LONGEST_ANSWER = 600
"""Characters of an answer that are kept in an error."""

_RAISE_QUOTA = "ask AWS to raise the quota (Service Quotas, Amazon EC2), or name other regions"
_SET_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile (`aws sts get-caller-identity`)"
)
_LEAST_POLICY = (
    "docs/clouds/aws.md has the least policy; where only some regions are allowed, open the account with "
    "regions=[...]"
)
_OWN_NETWORK = "name subnet_ids and security_group_ids that exist in this region"

VERDICTS = (
    # Nothing of this kind here now.
    Verdict(CapacityUnavailable, code="InsufficientFreeAddressesInSubnet", scope=Scope.ZONE),
    Verdict(CapacityUnavailable, code="InsufficientInstanceCapacity", ambiguous=False),
    Verdict(CapacityUnavailable, code="InsufficientHostCapacity"),
    Verdict(CapacityUnavailable, code="InsufficientReservedInstance"),
    Verdict(CapacityUnavailable, code="InsufficientCapacity"),
    Verdict(CapacityUnavailable, code="UnfulfillableCapacity"),
    Verdict(CapacityUnavailable, code="SpotMaxPriceTooLow"),
    Verdict(NotOffered, code="UnsupportedOperation", scope=Scope.OFFER),
    Verdict(NotOffered, code="Unsupported", scope=Scope.OFFER),
    Verdict(NotOffered, code="InvalidInstanceType", scope=Scope.OFFER),
    # The account may not have more of this here.
    Verdict(QuotaExceeded, code="VcpuLimitExceeded", hint=_RAISE_QUOTA),
    Verdict(QuotaExceeded, code="MaxSpotInstanceCountExceeded", hint=_RAISE_QUOTA),
    Verdict(QuotaExceeded, code="InstanceLimitExceeded", hint=_RAISE_QUOTA),
    Verdict(QuotaExceeded, code="VolumeLimitExceeded", scope=Scope.REGION, hint=_RAISE_QUOTA),
    Verdict(QuotaExceeded, code="MaxIOPSLimitExceeded", scope=Scope.REGION, hint=_RAISE_QUOTA),
    Verdict(
        QuotaExceeded,
        code="PendingVerification",
        scope=Scope.REGION,
        hint="AWS is still checking the account for this region; it takes minutes to hours",
    ),
    Verdict(
        NotOffered,
        code="OptInRequired",
        scope=Scope.REGION,
        hint="enable the region for the account first, or name other regions",
    ),
    # Too many calls; nothing was created.
    Verdict(RateLimited, code="RequestLimitExceeded"),
    Verdict(RateLimited, code="Throttl"),
    Verdict(RateLimited, code="RequestThrottled"),
    Verdict(RateLimited, code="EC2ThrottledException"),
    Verdict(RateLimited, code="TooManyRequests"),
    # The credentials, or what they allow.
    Verdict(AuthenticationFailed, code="AuthFailure", hint=_SET_CREDENTIALS),
    Verdict(AuthenticationFailed, code="InvalidClientTokenId", hint=_SET_CREDENTIALS),
    Verdict(AuthenticationFailed, code="UnrecognizedClient", hint=_SET_CREDENTIALS),
    Verdict(AuthenticationFailed, code="MissingAuthenticationToken", hint=_SET_CREDENTIALS),
    Verdict(AuthenticationFailed, code="IncompleteSignature", hint=_SET_CREDENTIALS),
    Verdict(
        AuthenticationFailed,
        code="SignatureDoesNotMatch",
        hint="the secret key is wrong, or this machine's clock is off",
    ),
    Verdict(
        AuthenticationFailed,
        code="InvalidSignature",
        hint="the secret key is wrong, or this machine's clock is off",
    ),
    Verdict(AuthenticationFailed, code="RequestExpired", hint="synchronise this machine's clock"),
    Verdict(
        AuthenticationFailed, code="ExpiredToken", hint="log in again: the temporary credentials ran out"
    ),
    Verdict(AuthenticationFailed, code="UnauthorizedOperation", hint=_LEAST_POLICY),
    Verdict(AuthenticationFailed, code="AccessDenied", hint=_LEAST_POLICY),
    Verdict(AuthenticationFailed, code="Blocked", hint="AWS has blocked the account: see its support page"),
    # Tokens of earlier creates.
    Verdict(BoxLost, code="IdempotentInstanceTerminated"),
    Verdict(UnexpectedAnswer, code="IdempotentParameterMismatch", ambiguous=True),
    # The box, or what it was to be made with.
    Verdict(BoxLost, code="InvalidInstanceID"),
    Verdict(RequestRefused, code="VPCIdNotSpecified", scope=Scope.REGION, hint=_OWN_NETWORK),
    Verdict(RequestRefused, code="MissingInput", scope=Scope.REGION, hint=_OWN_NETWORK),
    Verdict(RequestRefused, code="InvalidSubnet", scope=Scope.REGION, hint=_OWN_NETWORK),
    Verdict(RequestRefused, code="InvalidGroup", scope=Scope.REGION, hint=_OWN_NETWORK),
    Verdict(RequestRefused, code="InvalidSecurityGroup", scope=Scope.REGION, hint=_OWN_NETWORK),
    Verdict(RequestRefused, code="InvalidParameter"),
    Verdict(RequestRefused, code="MissingParameter"),
    Verdict(RequestRefused, code="InvalidAMIID", hint="name an image that exists in every region asked for"),
    Verdict(RequestRefused, code="InvalidKeyPair"),
    Verdict(RequestRefused, code="InvalidUserData"),
    Verdict(RequestRefused, code="InvalidBlockDeviceMapping"),
)
"""The first match wins. An answer that none of them knows is judged by its HTTP status."""


def code_of(error: CloudError) -> str:
    """Return AWS's own code of an error that `translated` made; empty where AWS gave none."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def translated(
    error: Exception, where: str, *, creating: bool = False, redact: Callable[[str], str] = str
) -> CloudError:
    """Return what an exception of boto3 means.

    Args:
        error: A `BotoCoreError` or `ClientError`.
        where: Which call it ended, for the message.
        creating: Whether the call creates a box; else nothing can have been created.
        redact: Removes secrets from a text.
    """
    from botocore.exceptions import ClientError

    if isinstance(error, ClientError):
        return _refused(error, where, redact)
    return _unanswered(error, where, creating, redact)


def _refused(error: Any, where: str, redact: Callable[[str], str]) -> CloudError:
    response = error.response
    told = response.get("Error", {})
    code = str(told.get("Code", ""))
    metadata = response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode")
    text = " ".join(redact(f"{code}: {told.get('Message', '')}").split())
    shown = text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]}..."
    message = f"aws answered {where} with {shown}"
    verdict = verdict_of(VERDICTS, status=status, code=code, text=text)
    if verdict is not None:
        ambiguous = False if verdict.ambiguous is None else verdict.ambiguous
        return verdict.error(
            message, hint=verdict.hint, scope=verdict.scope, ambiguous=ambiguous, answer=shown
        )
    match status:
        case 429:
            return RateLimited(message, answer=shown)
        case int() if status >= 500:
            return CloudUnreachable(message, answer=shown)
        case 401 | 403:
            return AuthenticationFailed(message, answer=shown)
        case 400 | 404 | 409 | 422:
            return RequestRefused(message, scope=Scope.OFFER, answer=shown)
    return UnexpectedAnswer(message, answer=shown)


def _unanswered(error: Exception, where: str, creating: bool, redact: Callable[[str], str]) -> CloudError:
    from botocore import exceptions, parsers

    text = redact(str(error))
    credentials = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.ProfileNotFound,
        exceptions.TokenRetrievalError,
        exceptions.SSOError,
        exceptions.NoAuthTokenError,
    )
    if isinstance(error, credentials):
        return AuthenticationFailed(f"aws has no credentials for {where}: {text}", hint=_SET_CREDENTIALS)
    if isinstance(error, exceptions.ParamValidationError):
        return RequestRefused(f"aws cannot be asked {where}: {text}")
    if isinstance(error, parsers.ResponseParserError):
        shown = text[:LONGEST_ANSWER]
        return UnexpectedAnswer(
            f"aws answered {where} with something that is no answer: {shown}", answer=shown
        )
    # Where no connection was made nothing was sent, so a create is known not to have happened.
    ambiguous = False if creating else None
    if isinstance(error, exceptions.EndpointConnectionError | exceptions.ConnectTimeoutError):
        message = f"aws cannot be reached for {where}: {text}"
        return CloudUnreachable(message, scope=Scope.REGION, ambiguous=ambiguous)
    if isinstance(error, exceptions.ProxyConnectionError):
        return CloudUnreachable(
            f"the proxy towards aws does not answer ({where})",
            hint="see HTTPS_PROXY",
            scope=Scope.CLOUD,
            ambiguous=ambiguous,
        )
    return CloudUnreachable(f"aws did not answer {where}: {type(error).__name__}: {text}")

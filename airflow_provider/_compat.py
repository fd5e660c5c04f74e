"""What differs between the releases of Airflow from 3.1 on, in one place."""

from __future__ import annotations

from typing import Any

try:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException
except ImportError:  # before Airflow 3.2
    from airflow.exceptions import (  # type: ignore[no-redef,attr-defined,unused-ignore]
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
    )


def configuration() -> Any:
    """Return Airflow's configuration, loaded when it is first asked for."""
    try:
        from airflow.sdk.configuration import conf
    except ImportError:  # before Airflow 3.2
        from airflow.configuration import conf  # type: ignore[no-redef,unused-ignore]
    return conf


def mask(secret: str | None) -> None:
    """Keep a value out of Airflow's logs."""
    if not secret:
        return
    try:
        from airflow.sdk.log import mask_secret
    except ImportError:  # before Airflow 3.1
        from airflow.sdk.execution_time.secrets_masker import (  # type: ignore[no-redef,import-not-found,unused-ignore]
            mask_secret,
        )
    mask_secret(secret)


__all__ = ("AirflowException", "AirflowFailException", "AirflowNotFoundException", "configuration", "mask")

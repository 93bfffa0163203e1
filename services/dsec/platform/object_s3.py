"""A bucket of S3, or of a server that speaks its protocol, as an object store.

    s3://bucket/prefix?endpoint=https://host:port&region=eu-central-1

Without an endpoint it is Amazon's. Credentials come from `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY` and, where there is one, `AWS_SESSION_TOKEN`; a URL that holds any is
refused, since URLs are printed. Checksums are sent where the protocol asks for them and not
elsewhere: not every server takes them, and blobs are named by their hash anyway.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

from dsec.platform.object_errors import ObjectStoreError
from dsec.platform.object_listing import REFRESH_AGE_S, Listed

KEY, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
CREDENTIALS = (KEY, SECRET, TOKEN)
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
CONNECTIONS_MAX = 32
REGION = "us-east-1"
_BUCKET = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_BUCKET_ELSEWHERE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,253}[a-zA-Z0-9]")
_QUERY = frozenset(("endpoint", "region"))
_READS = frozenset(("get_object", "head_object"))
_ABSENT = frozenset(("NoSuchKey", "404", "NotFound"))
_PRESENT = frozenset(("PreconditionFailed", "412"))


def credentials_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The credentials among the variables of a process."""
    return {name: environment[name] for name in CREDENTIALS if environment.get(name)}


class Bucket:
    """A bucket, or what is in it under a prefix. See `dsec.platform.objects.Backend`."""

    def __init__(self, url: str, credentials: Mapping[str, str] | None = None) -> None:
        """Nothing is asked of the server yet.

        Args:
            credentials: by the names of their variables; None: the process's own.

        Raises:
            ObjectStoreError: the URL is none, or credentials are missing.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ObjectStoreError(
                f"an s3:// URL holds no credentials: set {KEY} and {SECRET} in the environment"
            )
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not parts.netloc or set(query) - _QUERY:
            raise ObjectStoreError(
                "give the object store as s3://BUCKET/PREFIX?endpoint=URL&region=NAME"
            )
        _check_bucket(parts.netloc, "endpoint" in query)
        if "@" in (endpoint := query.get("endpoint", "")):
            raise ObjectStoreError("the endpoint of an s3:// URL holds no credentials")
        given = credentials_of(os.environ) if credentials is None else credentials
        if not given.get(KEY) or not given.get(SECRET):
            raise ObjectStoreError(
                f"s3://{parts.netloc} needs {KEY} and {SECRET} in the environment"
            )
        prefix = unquote(parts.path).strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._bucket = parts.netloc
        try:
            self._client = _client(endpoint, query.get("region", REGION), given)
        except ValueError as error:  # the library's own errors of this kind are among them
            raise ObjectStoreError(
                f"s3://{parts.netloc}: its endpoint or region is none: the endpoint is a URL such "
                f"as https://host:port, the region a name such as {REGION}"
            ) from error

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"s3://{self._bucket}/{self._prefix}"

    def write(self, name: str, data: bytes) -> None:
        """See `Backend`."""
        self._call("put_object", name, Body=data)

    def write_if_absent(self, name: str, data: bytes) -> bool:
        """See `Backend`."""
        if self._call("put_object", name, Body=data, IfNoneMatch="*") is not _REFUSED:
            return True
        if time.time() - self._written_s(name) > REFRESH_AGE_S:
            self.write(name, data)  # the same bytes, and young again
        return False

    def read(self, name: str) -> bytes | None:
        """See `Backend`."""
        answer = self._call("get_object", name)
        if answer is None:
            return None
        from botocore.exceptions import BotoCoreError

        try:
            with answer["Body"] as body:
                data: bytes = body.read()
        except BotoCoreError as error:  # the connection went in the middle
            self._fail(name, error)
        return data

    def delete(self, name: str) -> None:
        """See `Backend`."""
        self._call("delete_object", name)

    def listed(self) -> Iterator[Listed]:
        """See `Backend`."""
        from botocore.exceptions import BotoCoreError, ClientError

        pages = self._client.get_paginator("list_objects_v2")
        try:
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for one in page.get("Contents", ()):
                    name = one["Key"].removeprefix(self._prefix)
                    yield Listed(name, one["Size"], one["LastModified"].timestamp())
        except ClientError as error:
            self._fail("", error, str(error.response.get("Error", {}).get("Code", "")))
        except BotoCoreError as error:
            self._fail("", error)

    def delete_if_older(self, name: str, before_s: float) -> bool:
        """See `Backend`. S3 deletes under no such condition: between the two calls, a few
        milliseconds, a blob that is put again is deleted with the old one."""
        if not 0 < self._written_s(name) < before_s:
            return False
        self.delete(name)
        return True

    def _written_s(self, name: str) -> float:
        """When an object was written; 0 where there is none."""
        answer = self._call("head_object", name)
        return 0.0 if answer is None else float(answer["LastModified"].timestamp())

    def _call(self, operation: str, name: str, **arguments: Any) -> Any:
        """What the server answers; None where there is no such blob, `_REFUSED` where there is."""
        from botocore.exceptions import BotoCoreError, ClientError

        ask = getattr(self._client, operation)
        try:
            return ask(Bucket=self._bucket, Key=f"{self._prefix}{name}", **arguments)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if operation in _READS and code in _ABSENT:
                return None
            if code in _PRESENT:
                return _REFUSED
            self._fail(name, error, code)
        except BotoCoreError as error:
            self._fail(name, error)

    def _fail(self, name: str, error: Exception, code: str = "") -> NoReturn:
        # Its own sentence and not the library's: that one may quote what was sent.
        why = code or type(error).__name__
        what = f"blob {name.rpartition('/')[2][:12]}" if name else "listing it"
        raise ObjectStoreError(f"{self.place}: {what}: {why}") from error


_REFUSED = object()


def _check_bucket(name: str, elsewhere: bool) -> None:
    """Refuse a name that no bucket has: every call would fail, as if the store were away.

    Args:
        elsewhere: it is not Amazon's; other servers, and Amazon of old, allow more.
    """
    if not (_BUCKET_ELSEWHERE if elsewhere else _BUCKET).fullmatch(name):
        allowed = "letters, digits, dots, hyphens" + (", underscores" if elsewhere else "")
        raise ObjectStoreError(
            f"DSEC_OBJECT_STORE_URL names the bucket {name!r}, and none is called that: 3 to "
            f"{255 if elsewhere else 63} {'' if elsewhere else 'small '}{allowed}, with a letter "
            "or digit at both ends"
        )


def _client(endpoint: str, region: str, credentials: Mapping[str, str]) -> Any:
    # Imported here: it takes a third of a second, and directories need none of it.
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        # Patience is the callers': they know what they wait for, and how long.
        retries={"total_max_attempts": 1},
        max_pool_connections=CONNECTIONS_MAX,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if endpoint else {},
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint or None,
        region_name=region,
        aws_access_key_id=credentials[KEY],
        aws_secret_access_key=credentials[SECRET],
        aws_session_token=credentials.get(TOKEN),
        config=config,
    )

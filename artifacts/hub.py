"""Bundles on Hugging Face's hub, or on another one that speaks its protocol. Needs the extra `hub`.

What comes from a hub is not trusted: only files of a bundle are fetched, none larger than it can be, all from one
commit, into a folder of their own; they become a bundle at the destination only after everything has been verified.
The card is written anew.
"""

import importlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from artifacts.bundle import EVALUATION, MANIFEST, MANIFEST_LIMIT, TENSORS, Bundle
from artifacts.checks import verify
from artifacts.errors import HubError, SignpostError
from artifacts.loading import listed_files
from artifacts.reader import FolderReader

TIMEOUT = 300.0  # seconds for all of a push or pull
SIZE_LIMIT = 1 << 30  # bytes of tensors that are fetched; hundreds of times those of any model so far
_SLOW = "the hub did not answer within {:g} s: try again, or raise --timeout"
_WHERE = "check the network, HF_ENDPOINT and --endpoint"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def pull(
    repo: str, destination: str | Path, revision: str | None = None, endpoint: str | None = None,
    timeout: float = TIMEOUT,
) -> Bundle:  # fmt: skip
    """Fetches the bundle in `repo` (owner/name) at `revision`, verifies it and saves it to folder `destination`.

    timeout: seconds for everything. Raises HubError for what the hub refuses, for a wrong size and when the time is
    over, what `verify` raises for what the bundle holds, and what `Bundle.save` raises. The destination holds the old
    bundle, or none, until the new one is whole.
    """
    with tempfile.TemporaryDirectory(prefix="signpost-") as scratch:
        folder = Path(scratch)
        with _session(timeout) as hub:
            _fetch_bundle(_Fetch(hub, repo, revision, endpoint, time.monotonic() + timeout), folder)
        bundle = verify(folder)
        bundle.save(destination)
        return bundle


def _fetch_bundle(fetch: "_Fetch", folder: Path) -> None:
    (folder / MANIFEST).write_bytes(fetch(MANIFEST, MANIFEST_LIMIT))
    with FolderReader(folder) as reader:
        records = listed_files(reader)
    for name, record in records.items():
        limit = SIZE_LIMIT if name == TENSORS else MANIFEST_LIMIT
        if not 0 <= record.size <= limit:
            raise HubError(f"{fetch.repo}: {name} of {record.size} bytes, at most {limit} are fetched")
        (folder / name).write_bytes(fetch(name, record.size))


def push(
    path: str | Path, repo: str, private: bool = False, message: str = "Bundle", endpoint: str | None = None,
    timeout: float = TIMEOUT,
) -> str:  # fmt: skip
    """Verifies the bundle in folder `path` and puts it into `repo` (owner/name, made if it is new) in one commit.

    Nothing but the bundle's own files goes there, and the card is written anew. The token is the hub library's: see
    `hf auth login`. timeout: seconds for everything. Returns the commit's address. Raises what `verify` raises, and
    HubError.
    """
    bundle = verify(path)
    with tempfile.TemporaryDirectory(prefix="signpost-") as scratch:
        folder = bundle.save(Path(scratch) / "bundle")
        with _session(timeout) as hub:
            api = hub.HfApi(endpoint=endpoint, library_name="signpost-kv")
            api.create_repo(repo, private=private, exist_ok=True)
            changes = [hub.CommitOperationAdd(path.name, path) for path in sorted(folder.iterdir())]
            if bundle.evaluation is None and EVALUATION in api.list_repo_files(repo):
                changes.append(hub.CommitOperationDelete(EVALUATION))
            return str(api.create_commit(repo, changes, commit_message=message).commit_url)


class _Fetch:
    """Fetches files of one repository, all of the commit that the first one came from."""

    def __init__(self, hub: Any, repo: str, revision: str | None, endpoint: str | None, deadline: float):
        self.hub, self.repo, self.revision, self.endpoint, self.deadline = hub, repo, revision, endpoint, deadline

    def __call__(self, name: str, limit: int) -> bytes:
        """The file's bytes, `limit` at most."""
        url = self.hub.hf_hub_url(self.repo, name, revision=self.revision, endpoint=self.endpoint)
        # Not compressed: a few bytes could become gigabytes.
        utils = importlib.import_module("huggingface_hub.utils")
        headers = utils.build_hf_headers(library_name="signpost-kv") | {"accept-encoding": "identity"}
        with self.hub.get_session().stream("GET", url, headers=headers) as response:
            utils.hf_raise_for_status(response)
            if _COMMIT.fullmatch(commit := response.headers.get("x-repo-commit", "")):
                self.revision = commit
            return self._body(response, name, limit)

    def _body(self, response: Any, name: str, limit: int) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HubError(f"{self.repo}: {name} comes compressed, which was not asked for")
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if len(data) > limit:
                raise HubError(f"{self.repo}: {name} is longer than {limit} bytes. The repository holds no such bundle")
            if time.monotonic() > self.deadline:
                raise HubError(f"{self.repo}: the hub is too slow, {len(data)} bytes of {name} so far: raise --timeout")
        return bytes(data)


@contextmanager
def _session(timeout: float) -> Iterator[Any]:
    """huggingface_hub with a deadline for all requests together, and its errors as HubError."""
    if not timeout > 0:
        raise HubError(f"timeout={timeout} must be above 0 seconds")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError as error:
        raise HubError(f"{error}: pip install 'signpost-kv[hub]'") from error
    client = hub.get_session()
    make, hooks = type(client), client.event_hooks
    http = importlib.import_module(make.__module__.partition(".")[0])
    clamp = _clamp(time.monotonic() + timeout, timeout)
    limited = hooks | {"request": [*hooks.get("request", []), clamp]}
    hub.set_client_factory(lambda: make(event_hooks=limited, follow_redirects=True, timeout=timeout))
    # Xet, for files of gigabytes, knows no deadline; bundles are small and go through git-lfs.
    without_xet, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    try:
        yield hub
    except SignpostError:
        raise
    except http.TimeoutException as error:
        raise HubError(_SLOW.format(timeout)) from error
    except http.ConnectError as error:
        url = error.request.url
        raise HubError(
            f"no hub answers at {url.scheme}://{url.netloc.decode()} ({_one_line(error)}): {_WHERE}"
        ) from error
    except (http.HTTPError, http.InvalidURL, ConnectionError) as error:
        raise HubError(f"the hub: {_one_line(error)}") from error
    except (ValueError, KeyError, TypeError) as error:  # a name that is none, or an answer that no hub gives
        raise HubError(f"the hub: {type(error).__name__}: {_one_line(error)}") from error
    finally:
        constants.HF_HUB_DISABLE_XET = without_xet
        # What the library does by itself.
        hub.set_client_factory(lambda: make(event_hooks=hooks, follow_redirects=True, timeout=None))


def _clamp(deadline: float, timeout: float) -> Callable[[Any], None]:
    """A hook that gives every request, repeated ones included, no more than the time that is left."""

    def hook(request: Any) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HubError(_SLOW.format(timeout))
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), left)

    return hook


def _one_line(error: BaseException) -> str:
    """The library says over several lines what is missing and what to do; the hub's own words are among them."""
    return " ".join(str(error).split())[:500]

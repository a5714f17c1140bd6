"""`python -m calib model=... method=... bits=...`: calibrates a model and writes a bundle."""

import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException, ValidationError
from rich.console import Console

from artifacts import Bundle
from artifacts.errors import SignpostError
from calib.config import ConfigError, Settings, register
from calib.names import CONF
from calib.options import allowed, check_names, check_words

# Before torch is loaded: threads that wait for each other sleep. Spinning, which is the default, costs minutes where
# something else uses the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Without it cuBLAS may add up in another order from call to call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SEVERAL = {"-m", "--multirun"}
ELSE = {"-h", "--help", "--hydra-help", "-i", "--info", "-c", "--cfg"}  # that is all they do
COMPLETION = {"-sc", "--shell-completion"}  # a shell asks, and its options are none of ours


def _job(composed: DictConfig, stores: dict[Path, Any]) -> None:
    """One run. stores: statistics of this command's earlier runs by folder."""
    with _one_line_errors():
        settings = Settings.of(composed, HydraConfig.get().overrides.task)
        if os.environ.get("RANK", "0") == "0":  # of several ranks the first one reads and writes
            from calib.early import check

            check(settings)
        from calib.summary import summary

        def tell(bundle: Bundle) -> None:
            Console().print(summary(bundle, Path(settings.config.out), settings.counted_at))

        # Heavy imports only once the options are known to be sound, and only where they are needed.
        if settings.config.budget is not None and not settings.config.dry_run:
            from calib.allocation.again import again

            if found := again(settings):
                return tell(found)
        from calib.pipeline import run
        from calib.store import Store

        if settings.config.dry_run:
            from calib.plan import plan

            return Console().print(plan(settings))
        if settings.config.budget is not None:
            from calib.allocation.job import run

        store = Store(settings.work)
        if settings.config.work is None:
            store = stores.setdefault(settings.work, store)
        with _told_what_is_kept(store):
            if bundle := run(settings, Console(stderr=True), store):
                tell(bundle)


def _check(composed: DictConfig, outs: dict[str, str]) -> None:
    """Looks at one of several runs (-m) before the first of them begins. outs: where those before it save, and what
    they are."""
    with _one_line_errors():
        given = HydraConfig.get().overrides.task
        config = Settings.of(composed, given).config
        out = config.out
        if config.dry_run:
            return
        if before := outs.get(os.path.realpath(out)):
            raise ConfigError(
                f"{' '.join(given)} would save to {out}, as {before} would: name the folder by what differs, such as "
                "'out=bundles/${model.name}-${bits}-${seed}'"
            )
        outs[os.path.realpath(out)] = " ".join(given)


def _run(job: Callable[[DictConfig], None]) -> None:
    """Hands what Hydra makes of the command line to a job, once or several times."""
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises Terminated. Not among ranks: one that waits for others in C++ would never come to raise it."""

    def terminate(*_: Any) -> None:
        raise Terminated

    if os.environ.get("WORLD_SIZE", "1") != "1":
        return (yield)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _told_what_is_kept(store: Any) -> Iterator[None]:
    """An interruption says what is left of the run, and that it can go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        kept = f"the same command continues from {store.folder}, which is kept for it"
        if not store.kept:
            kept = "the same command starts from the beginning"
            kept = kept if stop.args else f"nothing was saved yet, {kept}"
        stop.args = (*stop.args, kept)
        raise


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turns errors that a user can mend into one line and exit code 2, Ctrl-C into exit code 130, SIGTERM into 143."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_fail(_one_line(error)))
    except (SignpostError, OSError) as error:
        sys.exit(_fail(str(error)))
    except RuntimeError as error:
        if not type(error).__module__.startswith("submitit") and "srun" not in str(error):
            raise
        sys.exit(_fail(_of_a_job(str(error))))
    except KeyboardInterrupt as stop:
        print(": ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT))


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _of_a_job(text: str) -> str:
    """What went wrong in a job that was launched elsewhere, or in launching it."""
    if found := re.findall(r"^error: (.*)$", text, re.MULTILINE):
        return f"a job failed: {found[-1]}"
    lines = text.strip().splitlines()
    return f"launcher=slurm: {lines[0]} (logs: .signpost-jobs/.submitit)" if lines else "launcher=slurm: a job failed"


def _one_line(error: BaseException) -> str:
    """What Hydra says over several lines, with its cause, and without its search path and its types."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        if error.missing_cfg_file.startswith("hydra/launcher/submitit"):
            return "launcher=slurm needs submitit, which is not installed: pip install 'signpost-kv[slurm]'"
        group, _, name = error.missing_cfg_file.partition("/")
        known = sorted(str(p.relative_to(CONF / group).with_suffix("")) for p in (CONF / group).rglob("*.yaml"))
        return f"{group}={name}: known are {', '.join(known)}"
    cause, given = error.__cause__, re.search(r"merging override (.*)", str(error))
    if given and isinstance(cause, ValidationError) and (values := allowed(cause.full_key or "")):
        return f"{given[1]}: allowed are {values}"
    text = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
    kept = re.split(r"\n\s*(?:Config search path|object_type=|reference_type=|See https)", text)[0]
    return re.sub(r"\s*full_key: \S+", "", kept)


@contextmanager
def _scratch() -> Iterator[str]:
    """Name of a folder for what Hydra leaves behind of several runs (-m). One run makes none."""
    path = os.path.join(tempfile.gettempdir(), f"signpost-{secrets.token_hex(8)}")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    """Entry point."""
    if COMPLETION & set(sys.argv[1:]):
        register()
        return _run(partial(_job, stores={}))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Hydra prints errors in its own way and exits with 1, unless it is told to raise them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with _one_line_errors(), _terminable(), _scratch() as scratch:
        register(scratch)
        # The shell leaves the ~ of `name=~/x` alone, and Hydra cannot read it.
        arguments = [a.replace("=~/", f"={Path.home()}/") for a in sys.argv[1:]]
        options = [a for a in arguments if "=" in a and not a.startswith("-")]
        flags = [a for a in arguments if a not in options]
        check_words(flags)
        check_names(options)
        # A recipe's formats are open tables, because parts have defaults: setting one must not need Hydra's `+`.
        options = [re.sub(r"^method\.(key|value|layers)\b", r"++\g<0>", a) for a in options]
        if SEVERAL & set(flags) and not ELSE & set(flags):
            # Here, whatever launches the runs.
            kept = [o for o in options if not re.match(r"[+~]*(hydra/)?launcher=|[+~]*hydra\.launcher\.", o)]
            sys.argv[1:] = [*flags, *kept, "hydra/launcher=basic"]
            _run(partial(_check, outs={}))
        sys.argv[1:] = [*flags, *options]  # flags first: argparse wants the options in one piece
        stores: dict[Path, Any] = {}
        _run(partial(_job, stores=stores))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from calib.ranks import leave

            leave()
        if os.environ.get("RANK", "0") == "0":  # all is done: nobody has to continue
            for store in stores.values():
                if not store.clear():
                    stays = "other runs have saved there what they continue from; if none will, delete it"
                    print(f"{store.folder} stays: {stays}", file=sys.stderr)


if __name__ == "__main__":
    main()

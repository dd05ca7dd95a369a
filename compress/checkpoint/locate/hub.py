"""Models of the Hugging Face hub, downloaded by `huggingface_hub`: its cache, its token and its environment variables
apply. Does not import torch."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from compress.checkpoint.config import CONFIG_FILE
from compress.checkpoint.locate.file_names import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SAFETENSORS_SUFFIX,
    only_pickles,
    part_names,
    side_names,
    weight_names,
)
from compress.checkpoint.locate.headers import headers_folder
from compress.common.errors import CheckpointError
from compress.common.files import size
from compress.common.model_folder import GGUF_SUFFIX

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?(?::([^:]+\.gguf))?", re.ASCII | re.IGNORECASE)
_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/([^/].*))?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub.

    Attributes:
        repo: `org/name`.
        revision: branch, tag or commit; None is the default branch.
        file: its GGUF file that is meant, the first of several parts; None is the whole model.
    """

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Reads `org/name`, `org/name@revision` or `org/name:file.gguf`; None for a text that is none of them."""
        found = _NAME.fullmatch(text)
        if found is None or found[1].lower().endswith(GGUF_SUFFIX):
            return None
        return cls(found[1], found[2], found[3])

    @classmethod
    def of_cached(cls, path: Path) -> HubModel | None:
        """Returns the model of which a path is the snapshot in a cache of the hub, or a file of it; None for any other
        path."""
        found = _SNAPSHOT.search(path.absolute().as_posix())
        return cls(f"{found[1]}/{found[2]}", found[3], found[4]) if found else None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")

    def cached(self, weights: bool = True) -> Path | None:
        """Returns the folder or file in the cache, without a request; None if it is not there."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, self.file or CONFIG_FILE, revision=self.revision)
        if not isinstance(found, str):
            return None
        if self.file:
            return Path(found)
        folder = Path(found).parent
        return folder if not weights or any(folder.glob(f"*{SAFETENSORS_SUFFIX}")) else None

    def download(self, *, weights: bool, code: bool, values: bool = True) -> Path:
        """Returns the folder, or the GGUF file, with all files that are read. Announces a download on standard error.
        Where the hub cannot be reached, what is in the cache is used.

        Args:
            values: False for the headers of dense weights in place of the weights, which are not in the cache.

        Raises:
            CheckpointError: no such model, revision or file, no access, no network, only pickle weights, or a disk that
                is too small.
        """
        from huggingface_hub import HfApi, constants, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
        from huggingface_hub.utils import disable_progress_bars

        with _refusals(self):
            try:
                timeout = constants.HF_HUB_ETAG_TIMEOUT
                info = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True, timeout=timeout)
            except (HTTPError, OfflineModeIsEnabled) as error:
                is_answer = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
                if is_answer or (found := self.cached(weights)) is None:
                    raise
                if not constants.HF_HUB_OFFLINE:
                    print(f"{constants.ENDPOINT} does not answer: {self} is taken from the cache", file=sys.stderr)
                return found
            sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
            index = ""
            if weights and INDEX_FILE in sizes and not self.file:
                index = Path(hf_hub_download(self.repo, INDEX_FILE, revision=info.sha)).read_text(encoding="utf-8")
            names = self._choose(sizes, index, weights, code)
            if not values and not self.file and (found := headers_folder(self.repo, info.sha or "", names)):
                return found
            self._announce({name: sizes[name] for name in names}, info.sha)
            if not sys.stderr.isatty():
                disable_progress_bars()
            # One after the other: Ctrl-C waits for the end of files that are downloaded in threads. The first by the
            # name of its revision, so that the cache knows its commit without a network.
            first = Path(hf_hub_download(self.repo, names[0], revision=self.revision))
            for name in names[1:]:
                hf_hub_download(self.repo, name, revision=info.sha)
        return first if self.file else first.parents[names[0].count("/")]

    def _choose(self, sizes: Mapping[str, int], index: str, weights: bool, code: bool) -> list[str]:
        """Returns the files to read of those that the repository has."""
        if self.file is not None:
            file = PurePosixPath(self.file)
            names = [str(file.with_name(name)) for name in part_names(file.name) or [file.name]]
            if missing := [name for name in names if name not in sizes]:
                raise CheckpointError(f"{self.repo} has no file {missing[0]}", self._gguf_choice(sizes))
            return names
        side, found = side_names(sizes, code), weight_names(sizes, index)
        if not weights and CONFIG_FILE in side:
            return side
        if not found:
            raise self._no_weights(sizes)
        return [*side, *found]

    def _no_weights(self, sizes: Mapping[str, int]) -> CheckpointError:
        if any(name.endswith(GGUF_SUFFIX) for name in sizes):
            return CheckpointError(f"{self.repo} holds GGUF files only", self._gguf_choice(sizes))
        if pickles := [name for name in sizes if PurePosixPath(name).suffix in PICKLE_SUFFIXES]:
            return only_pickles(self.repo, pickles[0], f"{self.repo.rpartition('/')[2]}-safetensors")
        return CheckpointError(f"{self.repo} holds no safetensors weights", "Name a model that has model.safetensors")

    def _gguf_choice(self, sizes: Mapping[str, int]) -> str:
        """A remedy: the GGUF files of the repository, those of several parts by their first."""
        found: dict[str, int] = {}
        for name in sorted(name for name in sizes if name.lower().endswith(GGUF_SUFFIX)):
            path = PurePosixPath(name)
            first = str(path.with_name((part_names(path.name) or [path.name])[0]))
            found[first] = found.get(first, 0) + sizes[name]
        listed = ", ".join(f"{self.repo}:{name} ({size(count)})" for name, count in found.items())
        return f"Name one of its GGUF files: {listed}" if found else "It has no GGUF files: leave the name out"

    def _announce(self, sizes: Mapping[str, int], commit: str | None) -> None:
        """Prints what is about to be downloaded. Raises CheckpointError if the disk of the cache is too small."""
        from huggingface_hub import constants, try_to_load_from_cache

        missing = [n for n in sizes if not isinstance(try_to_load_from_cache(self.repo, n, revision=commit), str)]
        if not missing:
            return
        needed, cache = sum(sizes[name] for name in missing), Path(constants.HF_HUB_CACHE)
        free = shutil.disk_usage(next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())).free
        if needed > free:
            problem = f"{self} needs {size(needed)} in {cache}, where {size(free)} are free"
            raise CheckpointError(problem, "Free space, or set HF_HOME to a folder on another disk")
        files = f"{len(missing)} {'files' if len(missing) > 1 else 'file'}, {size(needed)}"
        print(f"downloading {self} ({files}) to {cache}, where {size(free)} are free", file=sys.stderr, flush=True)


@contextmanager
def _refusals(model: HubModel) -> Iterator[None]:
    """Turns errors of the hub into a CheckpointError with the remedy."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        remedy = f"Accept its terms at {constants.ENDPOINT}/{model.repo}, then log in: hf auth login"
        raise CheckpointError(f"access to {model.repo} needs the consent of its owner", remedy) from error
    except errors.RepositoryNotFoundError as error:
        remedy = f"{constants.ENDPOINT} has no public model of this name. For a private one, log in: hf auth login"
        raise CheckpointError.missing("model folder", model, remedy) from error
    except errors.RevisionNotFoundError as error:
        remedy = f"Name a branch, tag or commit that {constants.ENDPOINT}/{model.repo} lists"
        raise CheckpointError(f"{model.repo} has no revision {model.revision}", remedy) from error
    except errors.HFValidationError as error:
        raise CheckpointError.missing("model folder", model, "Check the path or the name on the hub") from error
    except errors.OfflineModeIsEnabled as error:
        remedy = "Unset HF_HUB_OFFLINE to download it, since the cache of the hub lacks it, or name a folder"
        raise CheckpointError.missing("model folder", model, remedy) from error
    except (errors.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of this machine: a full disk, no permission
        raise _not_downloaded(model, error) from error


def _not_downloaded(model: HubModel, error: Exception) -> CheckpointError:
    from huggingface_hub import constants, errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    reason = " ".join(str(error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error).split())
    again = "Check the network, then run the same command again: complete files are kept"
    remedy = "Log in with another token: hf auth login" if status in (401, 403) else again
    return CheckpointError(f"{model} cannot be downloaded from {constants.ENDPOINT}: {reason or type(error)}", remedy)

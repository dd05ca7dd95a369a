"""Options that several commands share. Does not import torch, which keeps --help fast."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.locate import find_model
from compress.checkpoint.locate.hub import HubModel
from compress.common.cli import BUNDLED, DEMO_NAME, bundled_model, bundled_path, demo_model_path, option
from compress.common.errors import RequestError, ToolkitError, nearest
from compress.common.files import YamlPart, check_target, read_text, read_yaml
from compress.common.model_folder import PACKED
from runtime.core.adapter import parse_modules
from runtime.core.config import LoraOptions, RuntimeConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from runtime.core.request import Grammar


ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint, packed or dense: a folder, a name of the hub (ORG/NAME[@REVISION]), a GGUF file (FILE or "
        "ORG/NAME:FILE), or one of the bundled: demo or demo-mixture. Default: "
        "the folder 'packed' if it exists, else the bundled demo model.",
        show_default=False,
    ),
]
ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL...",
        help="Checkpoint, packed or dense: a folder, a name of the hub (ORG/NAME[@REVISION]), a GGUF file (FILE or "
        "ORG/NAME:FILE), or one of the bundled: demo or demo-mixture. Several are loaded on demand, and NAME=MODEL "
        "names one. Default: the folder 'packed' if it exists, else the bundled demo model.",
        show_default=False,
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of sampling, for reproducible output.")]


def resolve_model(model: Path | None, code: bool = False, values: bool = True) -> tuple[Path, str]:
    """Returns the folder to load and its description for the user; downloads a model of the hub.

    Args:
        code: whether Python files of the model may run.
        values: whether the values of weights are needed.

    Raises:
        CheckpointError: as `compress.checkpoint.gguf.folder.folder_of`.
    """
    if model is None and PACKED.is_dir():
        return PACKED, f"{PACKED}/ (the default)"
    if model is None:
        return demo_model_path(), f"{DEMO_NAME} (no model was given and the folder '{PACKED}' does not exist)"
    from compress.checkpoint.gguf.folder import folder_of

    return folder_of(model, values=values, code=code), f"{model} (bundled)" if bundled_model(model) else str(model)


def name_of(path: Path) -> str:
    """Returns the default name of a folder's model in the API."""
    if model := HubModel.of_cached(path):
        return model.repo
    return next((name for name in BUNDLED if path == bundled_path(name)), path.resolve().name)


def check_targets(*files: Path | None) -> None:
    """Raises CheckpointError if one of these files cannot be written."""
    for file in files:
        if file is not None:
            check_target(file)


def runtime_config(*groups: DataclassInstance) -> RuntimeConfig:
    """Combines groups of options, which are base classes of the configuration. Downloads a draft model of the hub."""
    config = RuntimeConfig(**{name: value for group in groups for name, value in asdict(group).items()})
    if HubModel.parse(config.speculative_model) is None:
        return config
    return replace(config, speculative_model=str(find_model(config.speculative_model)))


KEY_VARIABLE = "RUNTIME_API_KEY"


def key_of_environment() -> str | None:
    """Returns the API key from the environment, which other users cannot see in the process list."""
    return os.environ.get(KEY_VARIABLE)


def key_option(text: str) -> Any:
    """Declares `--api-key`."""
    text = f"{text} Default: the environment variable {KEY_VARIABLE}, which other users cannot see."
    return typer.Option("--api-key", default_factory=key_of_environment, show_default=False, help=text)


def warn_of_readers(file: Path) -> None:
    """Warns about a file with secrets that other users of this machine can read."""
    if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"warning: other users can read the secrets in {file}; run chmod 600 {file}", file=sys.stderr)


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Uses the values of a YAML file as defaults of a command's options, validated as on the command line.

    Raises:
        ToolkitError: the file cannot be read, names an unknown option or has a wrong value.
    """
    if file is not None:
        context.default_map = dict(_defaults(context, file))
        if context.default_map.keys() & {"api_key", "ssl_keyfile_password"}:
            warn_of_readers(file)
    return file


def _defaults(context: typer.Context, file: Path) -> Iterator[tuple[str, Any]]:
    options: list[Any] = context.command.params
    params = {flag.lstrip("-"): each for each in options for flag in (*each.opts, *each.secondary_opts)}
    del params["config"]
    root, given = read_yaml(file), set()
    if not isinstance(root.value, dict):
        raise ToolkitError(f"{file} is not a mapping", "Write a line 'OPTION: VALUE' for each option, without dashes")
    for key, part in root.value.items():
        name = key.replace("_", "-")
        if name not in params:
            raise ToolkitError(f"{part.place}: unknown option {key!r}", nearest(name, tuple(params), "Options"))
        param = params[name]
        if param.name in given:
            raise ToolkitError(f"{part.place}: {name!r} is given twice", "Keep one of them")
        given.add(param.name)
        value = _value(context, param, key, part)
        is_negative = f"--{name}" in param.secondary_opts
        yield param.name, not param.type_cast_value(context, value) if is_negative else value


def _value(context: typer.Context, param: Any, key: str, part: YamlPart) -> str | list[str]:
    value: str | list[str]
    if getattr(param, "multiple", False) or param.nargs == -1:
        value = [each.text(key) for each in (part.value if isinstance(part.value, list) else [part])]
    else:
        value = part.text(key)
    try:
        param.type_cast_value(context, value)
    except typer.BadParameter as error:
        problem = f"{part.place}: {key}: {error.message}"
        raise ToolkitError(problem, f"See {context.command_path} --help") from error
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        help="YAML file with options of this command, such as 'max-num-seqs: 64'. The command line overrides it.",
    ),
]


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Address, API keys and model name of a server."""

    host: str = option(default="127.0.0.1", help="Address to listen on; 0.0.0.0 is all addresses.")
    port: int = option(default=8000, help="Port to listen on; 0 picks a free one.")
    api_key: Annotated[str | None, key_option("API key that clients must send.")] = field(
        default_factory=key_of_environment
    )
    api_keys: Path | None = option(
        default=None,
        metavar="FILE",
        help="YAML list of further API keys: name, key, and as limits max_requests, requests_per_minute, "
        "tokens_per_minute. Read again on SIGHUP.",
    )
    name: str | None = option(
        "--served-model-name",
        default=None,
        help="Model name in the API. Default: the name of the folder, or that on the hub.",
    )


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Names, processes and kernels of a server."""

    allowed_host: list[str] | None = option(
        default=None,
        metavar="NAME",
        help="Host name that clients may use for the server, and whose web pages may access it; may be repeated. "
        "Default: any; on 127.0.0.1 local names only.",
    )
    warm_up: bool = option(
        default=True,
        help="On a GPU, compile kernels before the first request and capture CUDA graphs of every size, most of them "
        "while the server is idle; else at first use.",
    )
    jit_cache: Path | None = option(
        default=None,
        metavar="FILE",
        help="Import compiled kernels from this file, written by runtime warm-up --export, into Triton's cache folder "
        "first. Kernels are executable code: use files from trusted sources only.",
    )
    api_process: bool = option(
        default=True,
        help="Run the HTTP server in a process of its own, apart from the engine, so that neither waits for the "
        "other's Python; else in the engine's process, which needs less memory.",
    )


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Changes of the adapters of a server."""

    allow_runtime_lora_updating: bool = option(
        "--allow-runtime-lora-updating",
        default=False,
        help="Let clients load and unload adapters by /v1/load_lora_adapter and /v1/unload_lora_adapter, from any "
        "folder that the server can read. Needs --enable-lora or --lora-modules.",
    )

    def checked(self, lora: LoraOptions, model_names: Collection[str]) -> dict[str, Path]:
        """Returns paths of adapters by name. Raises ToolkitError for names that are not distinct."""
        adapters = parse_modules(lora.lora_modules or ())
        for name in adapters.keys() & set(model_names):
            remedy = "Give the adapter another name, or the model by --served-model-name or NAME=MODEL"
            raise ToolkitError(f"--lora-modules names an adapter {name!r}, as a model is named", remedy)
        if self.allow_runtime_lora_updating and not lora.serves_adapters:
            raise ToolkitError("--allow-runtime-lora-updating has no effect without adapters", "Add --enable-lora")
        return adapters


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Encryption of a server's connections. The fields have the names of uvicorn's options."""

    ssl_certfile: Path | None = option(
        default=None, metavar="FILE", help="Certificate chain of this server in PEM. Default: http without encryption."
    )
    ssl_keyfile: Path | None = option(
        default=None, metavar="FILE", help="Private key in PEM. Default: the one in --ssl-certfile."
    )
    ssl_keyfile_password: str | None = option(
        default=None, help="Password of the private key; preferably set in the file of --config."
    )
    ssl_ca_certs: Path | None = option(
        default=None,
        metavar="FILE",
        help="Accept only clients with a certificate signed by one of these. Default: clients need no certificate.",
    )

    def checked(self) -> dict[str, Any]:
        """Returns uvicorn's options; empty without a certificate.

        Raises:
            ToolkitError: a file cannot be read or used, or an option lacks the certificate.
        """
        import ssl

        files = {"--ssl-certfile": self.ssl_certfile, "--ssl-keyfile": self.ssl_keyfile}
        files["--ssl-ca-certs"] = self.ssl_ca_certs
        given = {flag: file for flag, file in files.items() if file is not None}
        if self.ssl_certfile is None:
            if given or self.ssl_keyfile_password is not None:
                flags = ", ".join(given) or "--ssl-keyfile-password"
                raise ToolkitError(f"{flags} has no effect without a certificate", "Add --ssl-certfile FILE")
            return {}
        for flag, file in given.items():
            try:
                file.open("rb").close()
            except OSError as error:
                raise ToolkitError(f"{flag} {file} cannot be read: {error.strerror}", "Name another file") from error
        context, password = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.ssl_keyfile_password or ""
        try:
            # Without this callback OpenSSL would prompt for a password on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: password)
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except ssl.SSLError as error:
            files_given = " ".join(f"{flag} {file}" for flag, file in given.items())
            problem = f"{files_given} cannot be used: {error.reason or 'not in PEM'}"
            raise ToolkitError(problem, "Name PEM files: a certificate, its own key, and the key's password") from error
        warn_of_readers(self.ssl_keyfile or self.ssl_certfile)
        return asdict(self) | {"ssl_cert_reqs": ssl.CERT_REQUIRED if self.ssl_ca_certs else ssl.CERT_NONE}


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Logs of a server."""

    log_level: str = option(
        default="info",
        choices=("error", "warning", "info", "debug"),
        help="Minimum level of log lines on standard error. info: a line per request, except /health and /metrics. "
        "debug: also why kernels were chosen.",
    )


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """Constraints on the generated text; at most one may be given."""

    json_schema: Path | None = option(
        default=None, metavar="FILE", help="Generate JSON that follows the JSON schema in FILE."
    )
    regex: str | None = option(default=None, help="Generate text that matches this regular expression completely.")

    def grammar(self) -> Grammar | None:
        """Returns the grammar. Raises RequestError if both are given, or the file cannot be read."""
        from runtime.core.request import Grammar, GrammarKind
        from runtime.text.json_rules import unenforced

        if self.json_schema is not None and self.regex is not None:
            raise RequestError("--json-schema and --regex exclude each other", "Use one of them")
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.json_schema is None:
            return None
        try:
            text = read_text(self.json_schema, RequestError)
        except OSError as error:
            problem = f"{self.json_schema} cannot be read: {error.strerror}"
            raise RequestError(problem, "Name a file with a JSON schema") from error
        if dropped := unenforced(text):
            print(f"{self.json_schema}: {', '.join(dropped)} not enforced", file=sys.stderr)
        return Grammar(GrammarKind.JSON_SCHEMA, text)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Server to measure: a running one, or one started for the benchmark."""

    url: str | None = option(default=None, help="URL of a running server. Default: start one for the benchmark.")
    api_key: Annotated[str | None, key_option("API key of the server.")] = field(default_factory=key_of_environment)
    serve_options: str = option(
        "--serve", default="", metavar="OPTIONS", help="Options of the started server, e.g. '--max-num-seqs 16'."
    )

"""Manifests of Kubernetes: their schema, their agreement with the command and its server, and the life of a pod."""

import importlib.util
import json
import re
import shlex
import signal
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from runtime_command import serving
from typer.testing import CliRunner

from runtime.cli import app

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FOLDERS = sorted(file.parent for file in KUBERNETES.rglob("kustomization.yaml"))
IMAGES = sorted(DEPLOY.glob("Containerfile*"))


def patched(document: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Applies a JSON patch of `add` and `replace`."""
    document = deepcopy(document)
    for each in operations:
        *parents, last = (part.replace("~1", "/") for part in each["path"].split("/")[1:])
        place: Any = document
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        if last == "-":
            place.append(each["value"])
        else:
            assert each["op"] == "add" or last in place
            place[last] = each["value"]
    return document


def resources(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the resources that `kubectl kustomize` makes of a folder."""
    made = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in made["resources"]:
        path = (folder / name).resolve()
        for document in resources(path) if path.is_dir() else yaml.safe_load_all(path.read_text()):
            for patch in made.get("patches", ()):
                target = patch["target"]
                if (document["kind"], document["metadata"]["name"]) == (target["kind"], target["name"]):
                    document = patched(document, yaml.safe_load(patch["patch"]))
            yield document


def by_kind(folder: Path) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in resources(folder)}


def container(folder: Path) -> dict[str, Any]:
    (only,) = by_kind(folder)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate")
def test_every_resource_follows_the_schema_of_kubernetes(folder: Path) -> None:
    import kubernetes_validate

    for document in resources(folder):
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_selectors_ports_and_volumes_lead_somewhere(folder: Path) -> None:
    found = by_kind(folder)
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    template, only = deployment["template"], container(folder)
    for selector in (deployment["selector"]["matchLabels"], service["selector"]):
        assert selector.items() <= template["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in only["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    assert {mount["name"] for mount in only["volumeMounts"]} == {each["name"] for each in template["spec"]["volumes"]}
    assert int(template["metadata"]["annotations"]["prometheus.io/port"]) == ports["http"]
    assert len(set(ports.values())) == len(ports)


def test_the_command_has_every_option_and_listens_on_the_declared_ports(folder: Path) -> None:
    args, ports = container(folder)["args"], {port["containerPort"] for port in container(folder)["ports"]}
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    options = {arg for arg in args if arg.startswith("--")}
    assert args[0] == "serve"
    assert options <= set(re.findall(r"--[a-z][a-z-]+", text))
    assert {int(arg.rpartition(":")[2]) for arg in args if re.fullmatch(r"tcp://.*|8000", arg)} == ports


def test_a_drain_has_the_time_that_the_server_takes(folder: Path) -> None:
    pod, only = by_kind(folder)["Deployment"]["spec"]["template"]["spec"], container(folder)
    drain = int(only["args"][only["args"].index("--drain-seconds") + 1])
    assert only["lifecycle"]["preStop"]["sleep"]["seconds"] + drain < pod["terminationGracePeriodSeconds"]
    assert only["startupProbe"]["httpGet"] == only["readinessProbe"]["httpGet"]
    assert "httpGet" not in only["livenessProbe"]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_run_the_server_without_privileges(image: Path) -> None:
    lines = re.sub(r"\\\n\s*", "", image.read_text()).splitlines()
    steps = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    user = [rest for name, _, rest in steps if name == "USER"]
    assert (
        int(user[-1]) == by_kind(KUBERNETES)["Deployment"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    )
    named = {name: json.loads(rest) for name, _, rest in steps if name in ("ENTRYPOINT", "CMD")}
    assert named["ENTRYPOINT"] == ["/opt/runtime/bin/runtime"]
    assert named["CMD"] == container(KUBERNETES)["args"][:4]
    assert {name for name, _, _ in steps} <= {"FROM", "RUN", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert all(shlex.split(rest) for _, _, rest in steps)


@pytest.mark.full
def test_a_pod_lives_and_ends_as_kubelet_and_routers_see_it(tmp_path: Path) -> None:
    only = container(KUBERNETES)
    _, _, _, _, _, _, *rest = only["args"]
    probe = only["readinessProbe"]["httpGet"]["path"]
    with (
        serving("demo", "--host", "0.0.0.0", *rest, cwd=tmp_path) as (process, url, _),
        httpx.Client(base_url=url, timeout=60, headers={"Host": "10.0.0.7:8000"}) as api,
    ):
        assert api.get(probe).status_code == 200
        names = re.findall(r"^vllm:(\w+)", api.get("/metrics").text, re.MULTILINE)
        assert {"num_requests_waiting", "kv_cache_usage_perc"} <= set(names)
        body = {"model": "demo", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with api.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=url, headers={"Host": "10.0.0.7:8000"}) as other:
                began = time.monotonic()
                while (response := other.get(probe)).status_code == 200:
                    assert time.monotonic() - began < 5
                assert response.status_code == 503
                assert other.post("/v1/completions", json=body).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0

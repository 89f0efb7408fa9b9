"""Holds the manifests of deploy/kubernetes against the published schemas, and against the agent."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path("deploy/kubernetes")
KUBERNETES = "1.31"
# What the agent needs after the drain, in seconds: DOWN_WITHIN of agent/src/hook.rs, STOP_DEADLINE of agent/src/daemon.rs, and some.
STOP_SECONDS = 10


def merged(base, patch):
    """A strategic merge without lists, which the overlays do not patch."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        assert not isinstance(patch, list), "merging lists is Kustomize's business"
        return patch
    return {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}


def identity(item):
    return item["apiVersion"], item["kind"], item["metadata"]["name"]


def build(folder):
    """The objects of a kustomization, as Kustomize would build them."""
    known = {"apiVersion", "kind", "namespace", "labels", "resources", "images", "patches"}
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization.keys() <= known, kustomization.keys() - known
    objects = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in kustomization.get("patches", []):
        change = yaml.safe_load((folder / patch["path"]).read_text())
        found = [item for item in objects if identity(item) == identity(change)]
        assert len(found) == 1, f"{patch}: {identity(change)} is not there once"
        objects[objects.index(found[0])] = merged(found[0], change)
    for item in objects:
        if "namespace" in kustomization and item["kind"] != "Namespace":
            item["metadata"]["namespace"] = kustomization["namespace"]
        for labels in kustomization.get("labels", []):
            item["metadata"].setdefault("labels", {}).update(labels["pairs"])
        for image in kustomization.get("images", []):
            for container in item["spec"]["template"]["spec"]["containers"] if item["kind"] == "DaemonSet" else []:
                assert container["image"] == image["name"], container["image"]
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def check_object(item):
    if item["kind"] == "PodMonitor":
        schema = json.loads(pathlib.Path("tests/package/kubernetes/podmonitor.schema.json").read_text())
        jsonschema.validate(item, schema)
    else:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def check_pod(objects):
    [daemon] = [item for item in objects if item["kind"] == "DaemonSet"]
    pod = daemon["spec"]["template"]["spec"]
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["port"] in ports, probe
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    drain = container["lifecycle"]["preStop"]["exec"]["command"]
    within = int(drain[drain.index("--within") + 1])
    assert within + STOP_SECONDS <= pod["terminationGracePeriodSeconds"], "the drain is cut short"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    labels = daemon["spec"]["template"]["metadata"]["labels"]
    for item in objects:
        selector = item.get("spec", {}).get("selector") or item.get("spec", {}).get("podSelector") or {}
        wanted = selector.get("matchLabels", selector if item["kind"] == "Service" else {})
        assert wanted.items() <= labels.items(), f"{identity(item)} selects no pod"
        if item["kind"] == "Service":
            assert item["spec"]["sessionAffinity"] == "ClientIP", "lanes would be spread over pods"
            assert all(port["targetPort"] in ports for port in item["spec"]["ports"])
    return pod, container, ports


def check_config(objects, program, ports):
    """The agent accepts the configuration where a pod has it, with a key and peers as a Secret holds them."""
    [config] = [item for item in objects if item["kind"] == "ConfigMap"]
    text = config["data"]["agent.toml"]
    assert f":{ports['quic']}\"" in text and f":{ports['metrics']}\"" in text
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def run(*words):
            return subprocess.run([program, *words], capture_output=True, text=True, timeout=60)

        peers = folder / "etc/culvert-peers"
        for part in ("etc/culvert", "etc/culvert-identity", "etc/culvert-peers/..1", "var/lib"):
            (folder / part).mkdir(parents=True)
        key = run("keygen", "--out", str(folder / "etc/culvert-identity/identity.key"))
        assert key.returncode == 0, key.stderr
        other = run("keygen", "--out", str(folder / "other.key")).stdout.strip()
        peer = f'name = "branch"\npublic_key = "{other}"\nallowed_ips = ["10.9.0.2"]\n'
        (peers / "..1/branch.toml").write_text(peer)
        (peers / "..data").symlink_to("..1")
        (peers / "branch.toml").symlink_to("..data/branch.toml")
        text = re.sub(r'"/(etc|var|run)/', lambda found: f'"{folder}/{found[1]}/', text)
        file = folder / "etc/culvert/agent.toml"
        file.write_text(text)
        checked = run("check", "--config", str(file))
        assert checked.returncode == 0 and "1 peer," in checked.stdout, checked.stdout + checked.stderr


def rendered(helm, mode):
    """The objects of the chart."""
    words = [helm, "template", "culvert", "deploy/helm/culvert", "--namespace", "culvert", "--set", f"mode={mode}", "--kube-version", KUBERNETES]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def check_chart(helm):
    """Unless told otherwise, the chart says what the manifests say, which are held against schemas and agent. A namespace is not its."""
    lint = subprocess.run([helm, "lint", "--strict", "--kube-version", KUBERNETES, "deploy/helm/culvert"], capture_output=True, text=True, timeout=60)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    for mode in ("host-network", "service"):
        wanted = {identity(item): item for item in build(ROOT / mode) if item["kind"] != "Namespace"}
        found = {identity(item): item for item in rendered(helm, mode)}
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        for name, item in found.items():
            assert item == wanted[name], f"{mode}: {name}:\n{json.dumps(item, indent=1)}\ninstead of\n{json.dumps(wanted[name], indent=1)}"
        print(f"deploy/helm/culvert, mode={mode}: the {len(found)} objects of deploy/kubernetes/{mode}")
    other = ["template", "deploy/helm/culvert", "--kube-version", KUBERNETES, "--set", "mode=other"]
    refused = subprocess.run([helm, *other], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "remedy" in refused.stderr, refused


def main():
    program, helm = sys.argv[1:]
    for overlay in ("host-network", "service"):
        objects = build(ROOT / overlay)
        for item in objects:
            try:
                check_object(item)
            except Exception as error:
                sys.exit(f"{overlay}: {identity(item)}: {error}")
        _, container, ports = check_pod(objects)
        assert container["args"][0] == "run"
        check_config(objects, program, ports)
        print(f"deploy/kubernetes/{overlay}: {len(objects)} objects are valid")
    if helm:
        try:
            check_chart(helm)
        except AssertionError as error:
            sys.exit(f"deploy/helm/culvert: {error}")
    else:
        print("deploy/helm/culvert: not rendered, there is no helm (remedy: CULVERT_HELM=$(tests/package/kubernetes/helm/get))")


main()

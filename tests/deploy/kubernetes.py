"""Validates manifests as an API server with strict field validation does, and prints them as JSON.

    python3 kubernetes.py VERSION[,VERSION] FILE... > documents.json

Core kinds are checked against Kubernetes' schemas of each version (kubernetes-validate). KEDA's, the Prometheus operator's
and cert-manager's are checked against models generated from their CustomResourceDefinitions (cloudcoil.models.*). Unknown
fields and unknown kinds are mistakes. An InferencePool is checked here by its published fields.

The output is an object from each FILE to the list of its documents.
"""

import importlib
import json
import sys

import kubernetes_validate
import yaml

CUSTOM = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
}


#: Fields of an InferencePool (llm-d.ai, "API reference", InferencePool), each with what holds of its value.
POOL = {
    "selector": lambda v: set(v) == {"matchLabels"} and all(isinstance(x, str) for x in v["matchLabels"].values()),
    "targetPorts": lambda v: 1 <= len(v) <= 8 and all(set(p) == {"number"} and 0 < p["number"] < 1 << 16 for p in v),
    "appProtocol": lambda v: v in ("http", "kubernetes.io/h2c"),
    "endpointPickerRef": lambda v: bool(v.get("name")) and set(v) <= {"group", "kind", "name", "port", "failureMode"}
    and set(v.get("port", {})) == {"number"} and v.get("failureMode", "FailClose") in ("FailOpen", "FailClose"),
}


def pool_mistakes(document):
    """The mistakes of an InferencePool, for which there is no package of models."""
    spec = document.get("spec", {})
    missing = {"selector", "targetPorts", "endpointPickerRef"} - set(spec)
    wrong = [name for name, value in spec.items() if name not in POOL or not POOL[name](value)]
    return [f"spec lacks {name}" for name in sorted(missing)] + [f"spec.{name} is wrong" for name in wrong]


class UniqueKeys(yaml.CSafeLoader):
    """YAML in which a duplicate key is a mistake, as in Kubernetes."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} is a duplicate", node.start_mark)
        return super().construct_mapping(node, deep)


def mistakes(document, versions):
    """The mistakes of a document, as sentences."""
    api, kind = document.get("apiVersion", ""), document.get("kind", "")
    if (api, kind) == ("inference.networking.k8s.io/v1", "InferencePool"):
        return pool_mistakes(document)
    if api in CUSTOM:
        model = getattr(importlib.import_module(CUSTOM[api]), kind, None)
        if model is None:
            return [f"{api} has no {kind}"]
        try:
            model.model_validate(document, extra="forbid")
        except ValueError as e:
            return [str(e)]
        return []
    found = []
    for version in versions:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as e:
            found.append(f"{version}: {'.'.join(map(str, e.path))}: {e.message}")
        except Exception as e:  # An unknown kind or version.
            found.append(f"{version}: {getattr(e, 'message', e)}")
    return found


def main():
    versions, files = sys.argv[1].split(","), sys.argv[2:]
    read, wrong = {}, []
    for file in files:
        with open(file, encoding="utf-8") as text:
            read[file] = [document for document in yaml.load_all(text, Loader=UniqueKeys) if document]
        for document in read[file]:
            name = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
            wrong += [f"{file}: {name}: {mistake}" for mistake in mistakes(document, versions)]
    print("\n".join(wrong), file=sys.stderr)
    json.dump(read, sys.stdout)
    sys.exit(1 if wrong else 0)


main()

"""Validates manifests as an API server with strict field validation does, and prints them as JSON.

    python3 kubernetes.py VERSION[,VERSION] FILE... > documents.json

Core kinds are checked against Kubernetes' schemas of each version (kubernetes-validate). KEDA's, the Prometheus operator's
and cert-manager's are checked against models generated from their CustomResourceDefinitions (cloudcoil.models.*). Unknown
fields and unknown kinds are mistakes.

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

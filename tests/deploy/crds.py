"""Holds deploy/kubernetes against CRDs' own schemas: `python -m tests.deploy.crds CRD.yaml …`.

The schemas are those of KubeRay (ray-operator/config/crd/bases) and JobSet (config/components/crd/bases). A field that
a schema does not have is refused, as `kubectl apply --validate=strict` refuses it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, which knows all fields that may be there; and Kubernetes' own types as JSON Schema has them."""
    found = {key: strict(value) if isinstance(value, dict) else value for key, value in schema.items()}
    is_object = "type" in schema and isinstance(schema.get("properties"), dict)
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return found


def schemas(paths: list[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """(apiVersion, kind) → schema."""
    found = {}
    for path in paths:
        crd = yaml.safe_load(path.read_text())["spec"]
        for version in crd["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # the API server's, in no CRD
            found[f"{crd['group']}/{version['name']}", crd["names"]["kind"]] = schema
    return found


def problems(manifest: dict[str, Any], known: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """What a manifest has that its schema does not allow."""
    schema = known.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        yield f"no schema of {manifest['apiVersion']} {manifest['kind']}"
        return
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def main() -> int:
    """Print what is wrong; 1 where something is."""
    known = schemas([Path(word) for word in sys.argv[1:]])
    wrong = 0
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            found = list(problems(manifest, known))
            wrong += len(found)
            print(f"{path.name}: {manifest['apiVersion']} {manifest['kind']}: {'; '.join(found) or 'sound'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

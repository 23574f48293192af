"""Validate deploy/kubernetes against the CRDs' own schemas: `python -m tests.deploy.crds CRD.yaml …`.

The schemas are those of KubeRay (ray-operator/config/crd/bases) and JobSet (config/components/crd/bases). Unknown
fields are refused, as with `kubectl apply --validate=strict`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with unknown fields forbidden, and Kubernetes' own types expressed in JSON Schema."""
    found = {key: strict(value) if isinstance(value, dict) else value for key, value in schema.items()}
    is_object = "type" in schema and isinstance(schema.get("properties"), dict)
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return found


def schemas(paths: list[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (apiVersion, kind) → schema."""
    found = {}
    for path in paths:
        crd = yaml.safe_load(path.read_text())["spec"]
        for version in crd["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # defined by the API server, not by a CRD
            found[f"{crd['group']}/{version['name']}", crd["names"]["kind"]] = schema
    return found


def problems(manifest: dict[str, Any], known: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """List the violations of a manifest's schema."""
    schema = known.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        yield f"no schema of {manifest['apiVersion']} {manifest['kind']}"
        return
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def main() -> int:
    """Print all violations, and return 1 if there are any."""
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

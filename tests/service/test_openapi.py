"""The OpenAPI file holds the wire shape; it changes only on purpose.

After a deliberate change: UPDATE_GOLDEN=1 pytest tests/service/test_openapi.py
"""

import json
import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "openapi.json"


def test_openapi_is_the_committed_one(wire):
    found = json.dumps(wire().get("/openapi.json").json(), indent=1, sort_keys=True) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def test_documentation_page_is_served(wire):
    response = wire().get("/docs")
    assert response.status_code == 200
    assert "swagger" in response.text.lower()


def test_examples_in_the_documentation_work(wire):
    paths = wire().get("/openapi.json").json()["paths"]
    tried = 0
    for path in ("/v2/rerank", "/v1/rerank", "/rerank"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for request in schema.get("anyOf", [schema]):
            for example in request["examples"]:
                assert wire().post(path, example).status_code == 200
                tried += 1
    assert tried == 7

"""The judge itself: what fits passes, and each kind of misfit is told."""

from __future__ import annotations

import httpx
import pytest

from tests.emulators.http import Reply, Request, instead
from tests.emulators.spec import Exempt, Spec, SpecChecked, published

THREE = Spec(
    {
        "servers": [{"url": "https://example.invalid/v2"}],
        "components": {
            "schemas": {
                "Named": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
                "Box": {
                    "allOf": [{"$ref": "#/components/schemas/Named"}],
                    "properties": {
                        "cards": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
                        "zone": {"type": "string", "nullable": True},
                        "parent": {"$ref": "#/components/schemas/Box"},
                    },
                },
            }
        },
        "paths": {
            "/boxes": {
                "get": {
                    "parameters": [
                        {"name": "limit", "in": "query", "schema": {"type": "integer"}},
                        {
                            "name": "kinds",
                            "in": "query",
                            "schema": {"type": "array", "items": {"enum": ["a", "b"]}},
                        },
                    ],
                    "responses": {"200": {"description": "", "content": {"application/json": {}}}},
                },
                "post": {
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Box"}}},
                    },
                    "responses": {
                        "201": {
                            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Box"}}}
                        },
                        "204": {"description": "nothing"},
                    },
                },
            },
            "/boxes/{id}": {
                "parameters": [{"name": "id", "in": "path", "schema": {"type": "integer"}}],
                "delete": {"responses": {"204": {"description": "gone"}}},
            },
        },
    }
)

TWO = Spec(
    {
        "swagger": "2.0",
        "basePath": "/api/",
        "definitions": {"Box": {"type": "object", "properties": {"name": {"type": "string"}}}},
        "paths": {
            "/boxes/available/": {"get": {"responses": {"200": {"schema": {"type": "array"}}}}},
            "/boxes/{box}/": {
                "put": {
                    "parameters": [
                        {"name": "box", "in": "path", "type": "string", "required": True},
                        {"name": "force", "in": "query", "type": "boolean", "required": True},
                        {"name": "body", "in": "body", "schema": {"$ref": "#/definitions/Box"}},
                    ],
                    "responses": {"default": {"schema": {"$ref": "#/definitions/Box"}}},
                }
            },
        },
    }
)


@pytest.mark.parametrize(
    ("spec", "method", "path", "query", "body", "problem"),
    [
        (THREE, "POST", "/boxes", {}, {"name": "a", "cards": 1, "zone": None}, None),
        (THREE, "POST", "/v2/boxes", {}, {"name": "a", "parent": {"name": "b"}}, None),
        (THREE, "POST", "/boxes", {}, {"cards": 1}, "'name' is a required property"),
        (THREE, "POST", "/boxes", {}, {"name": "a", "cards": 0}, "$.cards"),
        (THREE, "POST", "/boxes", {}, {"name": "a", "nme": "b"}, "'nme' was unexpected"),
        (THREE, "POST", "/boxes", {}, None, "a body is required"),
        (THREE, "GET", "/boxes", {"limit": "5", "kinds": "a,b"}, None, None),
        (THREE, "GET", "/boxes", {"limit": "five"}, None, "parameter limit"),
        (THREE, "GET", "/boxes", {"kinds": "a,c"}, None, "parameter kinds"),
        (THREE, "GET", "/boxes", {"lmit": "5"}, None, "no parameter lmit"),
        (THREE, "DELETE", "/boxes/7", {}, None, None),
        (THREE, "DELETE", "/boxes/seven", {}, None, "parameter id"),
        (THREE, "DELETE", "/boxes/7", {}, {}, "it takes no body"),
        (THREE, "PATCH", "/boxes/7", {}, None, "no such operation"),
        (TWO, "GET", "/api/boxes/available/", {}, None, None),
        (TWO, "PUT", "/api/boxes/a/", {"force": "true"}, {"name": "a"}, None),
        (TWO, "PUT", "/api/boxes/a/", {}, {"name": "a"}, "parameter force is required"),
        (TWO, "PUT", "/api/boxes/a/", {"force": "yes"}, {"name": 1}, "parameter force"),
    ],
)
def test_a_request_that_does_not_fit_is_told(
    spec: Spec, method: str, path: str, query: dict[str, str], body: object, problem: str | None
) -> None:
    problems = spec.request_problems(method, path, query=query, body=body)
    assert (problems == []) if problem is None else any(problem in each for each in problems)


@pytest.mark.parametrize(
    ("spec", "method", "path", "status", "body", "problem"),
    [
        (THREE, "POST", "/boxes", 201, {"name": "a"}, None),
        (THREE, "POST", "/boxes", 201, {"name": 1}, "$.name"),
        (THREE, "POST", "/boxes", 204, None, None),
        (THREE, "POST", "/boxes", 204, {}, "it has no body"),
        (THREE, "POST", "/boxes", 409, {}, "only 201, 204 are published"),
        (TWO, "PUT", "/api/boxes/a/", 500, {"name": 1}, "$.name"),
        (TWO, "GET", "/api/boxes/available/", 200, {}, "not of type 'array'"),
    ],
)
def test_an_answer_that_does_not_fit_is_told(
    spec: Spec, method: str, path: str, status: int, body: object, problem: str | None
) -> None:
    problems = spec.answer_problems(method, path, status, body)
    assert (problems == []) if problem is None else any(problem in each for each in problems)


class Checked(SpecChecked):
    spec_file = "runpod-v2.json"
    spec_exempt = (Exempt("'colour' was unexpected", "invented"),)

    def __init__(self) -> None:
        super().__init__()
        self.route("GET", "/v2/pods", "list", self._list)

    def _list(self, request: Request) -> Reply:
        return Reply(200, {"pods": "many"})


def test_an_emulator_tells_its_violations_when_it_is_left() -> None:
    published("runpod-v2.json")
    with pytest.raises(AssertionError, match="no parameter colour"), Checked() as emulator:
        emulator.fault("list", instead(599, {"meant": "to be wrong"}))
        httpx.get(f"{emulator.url}/v2/pods")
        assert emulator.violations == []
        httpx.get(f"{emulator.url}/v2/pods?colour=red")
        assert any("answer 200 to GET /v2/pods" in each for each in emulator.violations)


@pytest.mark.parametrize(
    "file", ["runpod-v2.json", "vastai.yaml", "hotaisle.json", "digitalocean-subset.json"]
)
def test_every_schema_of_a_published_specification_can_be_used(file: str) -> None:
    spec = published(file)
    for path, item in spec._document["paths"].items():
        for method in set(item) & {"get", "post", "put", "patch", "delete"}:
            filled = path.replace("{", "").replace("}", "")
            assert spec._operation(method.upper(), filled) is not None
            spec.request_problems(method.upper(), filled, body={})
            for status in item[method]["responses"]:
                if str(status).isdigit():
                    spec.answer_problems(method.upper(), filled, int(status), {})

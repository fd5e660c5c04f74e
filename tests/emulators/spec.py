"""Published API specifications as judges: of every request an adapter sends, and every answer an emulator gives.

`SpecChecked` goes before `HttpEmulator` among the bases of an emulator::

    class RunpodEmulator(SpecChecked, HttpEmulator):
        spec_file = "runpod-v2.json"

Each request and each answer of a route is then held against the specification, faults excepted: those are meant
to be wrong. What does not fit is collected, and leaving the emulator's context raises it. Where no folder of
specifications is there, nothing is checked, and `published` skips the tests that are about them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from jsonschema import Draft202012Validator

from .http import Handler, HttpEmulator, Reply, Request

FOLDER_SETTING = "GPU_FLOWS_SPECS"
_BESIDE_THE_PROJECT = Path(__file__).resolve().parents[3] / "shared" / "specs"
_BRANCHES = ("allOf", "anyOf", "oneOf")


def folder() -> Path | None:
    """Return the folder of the published specifications; None where there is none."""
    named = os.environ.get(FOLDER_SETTING)
    path = Path(named) if named else _BESIDE_THE_PROJECT
    return path if path.is_dir() else None


def published(file: str) -> Spec:
    """Return a specification; the test is skipped where it is not there."""
    spec = _load(file)
    if spec is None:
        pytest.skip(f"no {file}: set {FOLDER_SETTING} to the folder of published specifications")
    return spec


@dataclass(frozen=True)
class Exempt:
    """Where the live API is known to differ from its specification.

    Attributes:
        contains: A part of the problem's text.
        why: The source of the fact.
    """

    contains: str
    why: str


class Spec:
    """One OpenAPI 3 or Swagger 2 document.

    Args:
        document: The parsed document.
        strict: Whether a property or a parameter that the document does not name is a problem.
    """

    def __init__(self, document: Mapping[str, Any], *, strict: bool = True) -> None:
        self._document = document
        self._strict = strict
        self._bases = sorted(set(_base_paths(document)), key=len, reverse=True)
        # Literal paths before templates: /available/ is no {vm}.
        self._paths = sorted(
            ((_pattern(path), path) for path in document["paths"]), key=lambda each: each[1].count("{")
        )
        self._schemas: dict[int, tuple[Any, Draft202012Validator]] = {}

    def request_problems(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None
    ) -> list[str]:
        """Return what is wrong with a request; nothing for a right one."""
        found = self._operation(method, path)
        if found is None:
            return [f"{method} {path}: there is no such operation"]
        operation, parameters, in_path = found
        where = f"request {method} {path}"
        problems = [
            *self._query_problems(where, parameters, query or {}),
            *self._path_problems(where, parameters, in_path),
        ]
        schema, required = self._request_schema(operation, parameters)
        if body is None:
            return [*problems, f"{where}: a body is required"] if required else problems
        if schema is None:
            return [*problems, f"{where}: it takes no body"]
        return [*problems, *self._problems(where, schema, body)]

    def answer_problems(self, method: str, path: str, status: int, body: Any = None) -> list[str]:
        """Return what is wrong with an answer; nothing for a right one."""
        found = self._operation(method, path)
        if found is None:
            return []
        where = f"answer {status} to {method} {path}"
        responses = found[0]["responses"]
        response = responses.get(str(status), responses.get(f"{status // 100}XX", responses.get("default")))
        if response is None:
            return [f"{where}: only {', '.join(map(str, responses))} are published"]
        response = self._resolved(response)
        schema = response.get("schema") or _json_schema(response.get("content"))
        if schema is None:
            return [] if body is None else [f"{where}: it has no body"]
        return self._problems(where, schema, body)

    def schema_problems(self, name: str, value: Any) -> list[str]:
        """Return what is wrong with a value of a named schema."""
        schemas = self._document.get("components", {}).get("schemas") or self._document["definitions"]
        return self._problems(name, schemas[name], value)

    def _operation(self, method: str, path: str) -> tuple[Any, list[Any], dict[str, str]] | None:
        for base in self._bases:
            if not path.startswith(base):
                continue
            for pattern, template in self._paths:
                match = pattern.fullmatch("/" + path.removeprefix(base).lstrip("/"))
                item = self._document["paths"][template]
                if match and method.lower() in item:
                    operation = item[method.lower()]
                    parameters = [*item.get("parameters", ()), *operation.get("parameters", ())]
                    return operation, [self._resolved(each) for each in parameters], match.groupdict()
        return None

    def _request_schema(self, operation: Any, parameters: Sequence[Any]) -> tuple[Any, bool]:
        for parameter in parameters:
            if parameter["in"] == "body":
                return parameter["schema"], parameter.get("required", False)
        if "requestBody" not in operation:
            return None, False
        body = self._resolved(operation["requestBody"])
        return _json_schema(body["content"]), body.get("required", False)

    def _query_problems(
        self, where: str, parameters: Sequence[Any], query: Mapping[str, str]
    ) -> Iterator[str]:
        known = {parameter["name"]: parameter for parameter in parameters if parameter["in"] == "query"}
        for name, parameter in known.items():
            if parameter.get("required") and name not in query:
                yield f"{where}: the parameter {name} is required"
        for name, text in query.items():
            parameter = known.get(name) or known.get(f"{name}[]")
            if parameter is not None:
                yield from self._parameter_problems(where, parameter, text)
            elif self._strict:
                yield f"{where}: there is no parameter {name}"

    def _path_problems(
        self, where: str, parameters: Sequence[Any], in_path: Mapping[str, str]
    ) -> Iterator[str]:
        for parameter in parameters:
            name = _group(parameter["name"])
            if parameter["in"] == "path" and name in in_path:
                yield from self._parameter_problems(where, parameter, unquote(in_path[name]))

    def _parameter_problems(self, where: str, parameter: Any, text: str) -> list[str]:
        schema = parameter.get("schema") or _json_schema(parameter.get("content")) or parameter
        if schema is parameter:  # Swagger 2 has the type beside the name
            schema = {key: value for key, value in parameter.items() if key not in ("required", "in", "name")}
        schema = self._resolved(schema)
        value: Any = _read(text, schema)
        if "array" in _types(schema):
            items = self._resolved(schema.get("items", {}))
            value = [_read(each, items) for each in text.split(",")]
        return self._problems(f"{where}: the parameter {parameter['name']}", schema, value)

    def _problems(self, where: str, schema: Any, value: Any) -> list[str]:
        known = self._schemas.get(id(schema))
        if known is None:
            validator = Draft202012Validator(self._whole(schema, ()))
            # The schema is kept beside its validator, so that its id stays its own.
            known = self._schemas[id(schema)] = schema, validator
        return [
            f"{where}: {error.json_path}: {error.message[:300]}"
            for error in sorted(known[1].iter_errors(value), key=lambda error: error.json_path)
        ]

    def _resolved(self, node: Any) -> Any:
        while isinstance(node, Mapping) and "$ref" in node:
            node = self._target(node["$ref"])
        return node

    def _target(self, reference: str) -> Any:
        assert reference.startswith("#/"), f"only references within the document are known: {reference}"
        target: Any = self._document
        for part in reference[2:].split("/"):
            target = target[unquote(part).replace("~1", "/").replace("~0", "~")]
        return target

    def _whole(self, schema: Any, seen: tuple[str, ...], *, branch: bool = False) -> Any:
        """Return a schema as JSON Schema 2020-12 has it, with its references put in and closed objects.

        Args:
            schema: As the document has it.
            seen: The references that lead here: a schema that holds itself is checked to that depth.
            branch: It is a part of an object that is closed as a whole.
        """
        if not isinstance(schema, Mapping):
            return schema
        if "$ref" in schema:
            reference = schema["$ref"]
            if reference in seen:
                return True
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            target = self._target(reference)
            merged = {"allOf": [target], **beside} if _constrains(beside) else target
            return self._whole(merged, (*seen, reference), branch=branch)
        whole: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _BRANCHES:
                whole[key] = [self._whole(each, seen, branch=True) for each in value]
            elif key in ("properties", "patternProperties"):
                whole[key] = {name: self._whole(each, seen) for name, each in value.items()}
            elif key in ("items", "additionalProperties", "not"):
                whole[key] = self._whole(value, seen)
            elif key not in ("nullable", "x-nullable", "example", "examples", "discriminator", "default"):
                whole[key] = value
        for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(whole.get(limit), bool) and whole.pop(limit):  # OpenAPI 3.0, Swagger 2
                whole[limit] = whole.pop(bound)
        is_object = "properties" in whole or any(key in whole for key in _BRANCHES)
        if self._strict and is_object and not branch and "additionalProperties" not in whole:
            whole["unevaluatedProperties"] = False
        if schema.get("nullable") or schema.get("x-nullable"):
            return {"anyOf": [{"type": "null"}, whole]}
        return whole


class SpecChecked(HttpEmulator):
    """An emulator whose requests and answers are held against a published specification.

    Attributes:
        spec_file: The file in the folder of specifications.
        spec_strict: Whether what the specification does not name is a problem.
        spec_exempt: Where the live API is known to differ.
        spec_judges: Whether a request is to be judged; a vendor's own SDK may send what it likes.
        violations: What did not fit, in order.
    """

    spec_file: str
    spec_strict: bool = True
    spec_exempt: tuple[Exempt, ...] = ()
    spec_judges: Callable[[Request], bool] = staticmethod(lambda _: True)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.violations: list[str] = []
        self._spec = _load(self.spec_file, self.spec_strict)
        super().__init__(*args, **options)

    def route(self, method: str, pattern: str, operation: str, handler: Handler) -> None:
        """Add a route whose answers are judged."""

        def judged(request: Request) -> Reply:
            reply = handler(request)
            if self._spec is not None:
                self._note(self._spec.answer_problems(request.method, request.path, reply.status, reply.body))
            return reply

        super().route(method, pattern, operation, judged)

    def answer(self, request: Request) -> Reply:
        """Judge a request, and answer it whatever the judgement."""
        if self._spec is not None and self.spec_judges(request):
            self._note(
                self._spec.request_problems(
                    request.method, request.path, query=request.query, body=request.body
                )
            )
        return super().answer(request)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            assert not self.violations, "\n".join(dict.fromkeys(self.violations))

    def _note(self, problems: Sequence[str]) -> None:
        with self.lock:
            self.violations += [
                problem
                for problem in problems
                if not any(exempt.contains in problem for exempt in self.spec_exempt)
            ]


@cache
def _load(file: str, strict: bool = True) -> Spec | None:
    where = folder()
    if where is None or not (where / file).is_file():
        return None
    text = (where / file).read_text("utf-8")
    if file.endswith(".json"):
        return Spec(json.loads(text), strict=strict)
    import yaml

    # The C loader: a file of 300 kB takes the other one seconds.
    return Spec(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), strict=strict)


def _base_paths(document: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield document.get("basePath", "").rstrip("/")
    for server in document.get("servers", ()):
        yield urlsplit(server["url"]).path.rstrip("/")


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{([^}]+)\}", template.rstrip("/"))
    text = "".join(
        re.escape(part) if index % 2 == 0 else f"(?P<{_group(part)}>[^/]+)"
        for index, part in enumerate(parts)
    )
    return re.compile(text + "/?")


def _group(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _json_schema(content: Mapping[str, Any] | None) -> Any:
    """Return the schema of the JSON that is published for a body."""
    for kind, media in (content or {}).items():
        if "json" in kind or kind == "*/*":
            return media.get("schema", True)
    return None


def _constrains(beside: Mapping[str, Any]) -> bool:
    """Tell whether what stands beside a reference is more than words."""
    return bool(set(beside) - {"description", "title", "summary", "example", "examples", "default"})


def _types(schema: Any) -> Sequence[str]:
    types = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    return [types] if isinstance(types, str) else types


def _read(text: str, schema: Any) -> Any:
    """Return what a parameter's text stands for, where it is of the published type; else the text."""
    types = _types(schema)
    if "boolean" in types and text in ("true", "false"):
        return text == "true"
    for name, read in (("integer", int), ("number", float)):
        if name in types:
            try:
                return read(text)
            except ValueError:
                continue
    return text

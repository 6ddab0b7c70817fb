"""Structural schemas, as CustomResourceDefinitions need them, from records.

In: a msgspec record, its Metas and `CelRule`s. Out: OpenAPI v3 without references and null. An
optional field is not required, int | str becomes Kubernetes' int-or-string, and objects that
contain defaults default to {} so that the stored object shows those defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect as types

from baton_operator.api.cel import RULES, CelRule

Schema = dict[str, Any]


def schema_of(record: type[msgspec.Struct], defaults: bool) -> Schema:
    """`defaults` is true for a spec, false for a status, which contains only what was written."""
    kind = types.type_info(record)
    assert isinstance(kind, types.StructType)
    return _object(kind, defaults)


def validations(rules: Iterable[CelRule]) -> Schema:
    """The rules as a part of a schema; empty if there are none."""
    result = []
    for rule in rules:
        where = {"fieldPath": rule.field} if rule.field else {}
        result.append({"rule": rule.cel, "message": rule.message, **where})
    return {"x-kubernetes-validations": result} if result else {}


def _object(record: types.StructType, defaults: bool) -> Schema:
    required = [item.encode_name for item in record.fields if item.required]
    whole = {"x-kubernetes-map-type": "atomic"} if getattr(record.cls, "whole", False) else {}
    return {
        "type": "object",
        "description": inspect.cleandoc(record.cls.__dict__["__doc__"]),
        **whole,
        **({"required": required} if required else {}),
        "properties": {item.encode_name: _field(item, defaults) for item in record.fields},
        **validations(getattr(record.cls, "rules", ())),
    }


def _field(item: types.Field, defaults: bool) -> Schema:
    schema = _schema(item.type, defaults)
    default = _default(item, schema) if defaults else None
    return schema if default is None else schema | {"default": default}


def _default(item: types.Field, schema: Schema) -> Any:
    """None if the field should be absent: empty strings and lists would only be noise."""
    if isinstance(item.default, msgspec.Struct):
        inner = schema["properties"].values()
        return {} if any("default" in part for part in inner) else None
    plain = isinstance(item.default, (bool, int, str)) and item.default != ""
    return item.default if plain else None


def _schema(kind: types.Type, defaults: bool) -> Schema:
    match kind:
        case types.Metadata():
            rules = validations((kind.extra or {}).get(RULES, ()))
            return _schema(kind.type, defaults) | (kind.extra_json_schema or {}) | rules
        case types.StructType():
            return _object(kind, defaults)
        case types.UnionType():
            return _union(kind, defaults)
        case types.VarTupleType():
            bounds = _bounds(minItems=kind.min_length, maxItems=kind.max_length)
            items = _schema(kind.item_type, defaults)
            # One applier owns the whole list, unless a Meta overrides this.
            return {"type": "array", **bounds, "x-kubernetes-list-type": "atomic", "items": items}
        case types.DictType(value_type=types.AnyType()):
            return {"type": "object"}  # a Meta describes its contents
        case types.DictType():
            bounds = _bounds(maxProperties=kind.max_length)
            values = _schema(kind.value_type, defaults)
            return {"type": "object", **bounds, "additionalProperties": values}
        case types.LiteralType():
            return {"type": "string", "enum": list(kind.values)}
        case types.BoolType():
            return {"type": "boolean"}
        case types.IntType():
            bounds = _bounds(minimum=kind.ge, maximum=kind.le)
            # int32 as in the fields that specs are copied to, such as a Deployment's replicas.
            return {"type": "integer", "format": "int32" if defaults else "int64", **bounds}
        case types.StrType():
            return {"type": "string", **_bounds(maxLength=kind.max_length)}
    raise AssertionError(f"{kind} has no schema")


def _union(kind: types.UnionType, defaults: bool) -> Schema:
    """None means that the field is absent."""
    schemas = [
        _schema(schema, defaults) for schema in kind.types if not isinstance(schema, types.NoneType)
    ]
    if len(schemas) == 1:
        return schemas[0]
    assert sorted(schema["type"] for schema in schemas) == ["integer", "string"], kind
    [longest] = [schema["maxLength"] for schema in schemas if schema["type"] == "string"]
    return {"x-kubernetes-int-or-string": True, "maxLength": longest}


def _bounds(**bounds: int | float | None) -> Schema:
    return {name: bound for name, bound in bounds.items() if bound is not None}

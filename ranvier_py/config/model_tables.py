"""The `[[model]]` tables of the configuration: what each may have, and how it is read.

Rule: a table is checked alone as it is read, all of them together in `problems`: names that have two, or that lead back
to themselves. Whether an engine serves a target shows only while the node runs (`node/parts/model_parts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from ranvier_py.config.config_values import OptionalPath, Secret, split_text
from ranvier_py.config.secret_files import read_secret_file
from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.options import SECONDS_MAX
from ranvier_py.core.prompts.body_json import NAME_CHARACTERS_MAX
from ranvier_py.core.routing.models.model_rules import GLOB, KINDS, TABLES_MAX, ModelRule, ModelTable

TARGETS_MAX = 64  # of one table

MODEL_HELP = (
    "Models by name, each a table: name, or a glob such as claude-*, and to, the model that serves it (or several with "
    "their weights), fallback, fallback_on, tenants, max_tokens, defaults, cost, first_event_timeout_s, "
    "stall_timeout_s, worker_retries_max, total_retries_max, retry_statuses, api_key or api_key_file, "
    "model_in_answer. See docs/models.md. The flag repeats, as NAME=MODEL; the variable separates by blanks."
)


def model_name(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("must be the name of a model: printable, without blanks around it")
    return text


def target_name(text: str) -> str:
    if GLOB.search(text):
        raise ValueError("must be one model, not a glob")
    return model_name(text)


def weights(value: object) -> object:
    """A model, or a list of equal ones, as a table of weights."""
    if isinstance(value, str):
        return {value: 1.0}
    return dict.fromkeys(value, 1.0) if isinstance(value, list | tuple) and all_texts(value) else value


def all_texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def model_fields(value: object) -> object:
    """ "NAME=MODEL" -> its fields."""
    if not isinstance(value, str):
        return value
    name, equals, target = value.rpartition("=")
    if not equals:
        raise ValueError("must be NAME=MODEL, or a table of a file")
    return {"name": name, "to": target}


Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX), AfterValidator(model_name)]
Target = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX), AfterValidator(target_name)]
Weight = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
Price = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=SECONDS_MAX, allow_inf_nan=False)] | None


class CostSpec(BaseModel):
    """What tokens cost. What is left out costs what input, or output, does; answers that no engine computes nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    input: Price = 1.0
    cached_input: Price | None = None
    cache_write: Price | None = None
    output: Price = 1.0
    reasoning: Price | None = None
    cached_answers: Share = 0.0

    @property
    def cost(self) -> ModelCost:
        return ModelCost(
            input=self.input,
            cached_input=self.input if self.cached_input is None else self.cached_input,
            cache_write=self.input if self.cache_write is None else self.cache_write,
            output=self.output,
            reasoning=self.output if self.reasoning is None else self.reasoning,
            cached_answers=self.cached_answers,
        )


class ModelSpec(BaseModel):
    """One table, as `core.routing.models.model_rules.ModelRule` explains it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Name
    to: Annotated[dict[Target, Weight], BeforeValidator(weights), Field(max_length=TARGETS_MAX)] = {}
    fallback: Annotated[tuple[Target, ...], Field(max_length=TARGETS_MAX)] = ()
    fallback_on: tuple[Literal[KINDS], ...] = KINDS[:-1]  # type: ignore[valid-type]
    tenants: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    first_event_timeout_s: Seconds = None
    stall_timeout_s: Seconds = None
    worker_retries_max: Annotated[int, Field(strict=True, ge=1)] | None = None
    total_retries_max: Annotated[int, Field(strict=True, ge=0, le=100)] | None = None
    retry_statuses: tuple[Annotated[int, Field(strict=True, ge=400, le=599)], ...] | None = None
    api_key: Secret = None
    api_key_file: OptionalPath = None
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    defaults: dict[str, Any] = {}
    cost: CostSpec | None = None
    model_in_answer: Literal["served", "asked"] = "served"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in ("to", "tenants"):  # nobody would take an empty list of tenants for all of them
            if name in self.model_fields_set and not getattr(self, name):
                raise ValueError(f"{name}: is empty: leave it out, or name one")
        if self.to and not any(self.to.values()):
            raise ValueError("to: one of the weights must be above 0")
        if "model" in self.defaults or "stream" in self.defaults:
            raise ValueError("defaults: model and stream are the client's")
        return self

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Show what is set, and of a key that it is."""
        values: dict[str, Any] = handler(self)
        shown = {key: value for key, value in values.items() if key in self.model_fields_set}
        shown |= {"cost": self.cost.model_dump(exclude_unset=True)} if self.cost is not None else {}
        return shown | ({"api_key": "***"} if shown.pop("api_key", None) and self.api_key_file is None else {})

    @property
    def rule(self) -> ModelRule:
        return ModelRule(
            *(self.name, self.to, self.fallback, self.fallback_on, self.tenants),
            first_event_s=self.first_event_timeout_s,
            stall_s=self.stall_timeout_s,
            worker_retries_max=self.worker_retries_max,
            total_retries_max=self.total_retries_max,
            retry_statuses=self.retry_statuses,
            api_key=self.api_key.get_secret_value() if self.api_key is not None else "",
            max_tokens=self.max_tokens,
            defaults=self.defaults,
            cost=self.cost.cost if self.cost is not None else None,
            names_asked=self.model_in_answer == "asked",
        )


Models = Annotated[tuple[Annotated[ModelSpec, BeforeValidator(model_fields)], ...], BeforeValidator(split_text)]


def table_of(specs: Sequence[ModelSpec]) -> ModelTable | None:
    """Return the tables together; None if there are none."""
    return ModelTable([spec.rule for spec in specs]) if specs else None


def problems(specs: Sequence[ModelSpec]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key, what is wrong) for tables that are each good alone but not together."""
    if len(specs) > TABLES_MAX:
        yield ("model",), f"there are more than {TABLES_MAX} tables"
    elif specs:
        for number, message in ModelTable([spec.rule for spec in specs]).problems():
            yield (f"model[{number}]",), message


def problems_among(tables: object) -> Iterator[tuple[str, str]]:
    """Yield what is wrong between those of these tables that are each good, where others are not."""
    found = dict[int, ModelRule]()
    for number, table in enumerate(tables if isinstance(tables, list | tuple) else ()):
        with suppress(ValidationError, ValueError):
            found[number] = ModelSpec.model_validate(model_fields(table)).rule
    numbers = list(found)
    for place, message in ModelTable(list(found.values())).problems():
        yield f"model[{numbers[place]}]", message


def with_keys(specs: Sequence[ModelSpec], add: Any) -> tuple[ModelSpec, ...]:
    """Return the tables with the keys that their files hold. `add` takes the key of a problem, and what is wrong."""
    made = []
    for number, spec in enumerate(specs):
        if spec.api_key_file is not None:
            try:
                if spec.api_key is not None:
                    raise ConfigError(["api_key is set as well; set one of them"])
                key = SecretStr(read_secret_file(spec.api_key_file))
                spec = spec.model_copy(update={"api_key": key})  # noqa: PLW2901  # the same, complete
            except ConfigError as error:
                add(f"model[{number}].api_key_file", str(error))
        made.append(spec)
    return tuple(made)


def secrets_of(specs: Sequence[ModelSpec]) -> Mapping[str, None]:
    return dict.fromkeys(spec.api_key.get_secret_value() for spec in specs if spec.api_key is not None)

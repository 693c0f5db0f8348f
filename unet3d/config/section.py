"""What every section of a configuration has in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A group of settings: immutable, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _take_empty(cls, value: Any) -> Any:
        """Accept a section whose lines are all comments, which YAML reads as null."""
        return {} if value is None else value

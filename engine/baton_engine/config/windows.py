"""Read which layers have a sliding window from a config.json, as transformers does. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton_engine.config.config_json import MOST_LAYERS, ConfigFields, shown
from baton_engine.errors import ModelError, UnsupportedModel

FULL, SLIDING = "full_attention", "sliding_attention"
# The default of `max_window_layers`.
DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers of a family have a window, and the default of `sliding_window`.

    "none": no layer. "all": every layer. "switched": if `use_sliding_window` is true, the layers in
    `layer_types` or, without that, the layers from `max_window_layers` on. "alternating": the
    layers in `layer_types` or, without that, every other layer, beginning with the first.
    "switched_all" and "switched_alternating": the same as these, if `use_sliding_window` is true;
    the latter only for layers before `max_window_layers`.
    """

    kind: Literal[
        "none", "all", "switched", "alternating", "switched_all", "switched_alternating"
    ] = "none"
    default: int | None = None

    def read(self, values: Mapping[str, Any]) -> tuple[int | None, ...]:
        """The window of each layer."""
        fields = ConfigFields(values)
        layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
        kinds = fields.texts("layer_types")
        unknown = sorted(set(kinds or ()) - {FULL, SLIDING})
        if unknown:
            raise UnsupportedModel(
                f"layer_types {shown(unknown)} are not supported; supported: {FULL}, {SLIDING}"
            )
        if kinds is not None and len(kinds) != layers:
            raise ModelError(
                f"config.json: layer_types has {len(kinds)} entries; expected num_hidden_layers, "
                f"{layers}"
            )
        window = self._window(values)
        implied = self._implied_kinds(values, layers, bool(window))
        chosen = self.kind not in ("none", "all", "switched_all") and window
        if kinds is not None and kinds != implied and not chosen:
            raise UnsupportedModel(
                f"layer_types {sorted(set(kinds))} do not fit sliding_window "
                f"{values.get('sliding_window')!r} and use_sliding_window "
                f"{values.get('use_sliding_window')!r} of this architecture"
            )
        # A window as long as the model's maximum length hides no key.
        hides = window is not None and window < fields.integer("max_position_embeddings")
        if hides and self.kind == "none":
            raise UnsupportedModel(
                f"sliding_window {window} is not supported for this architecture"
            )
        return tuple(window if hides and kind == SLIDING else None for kind in kinds or implied)

    def _window(self, values: Mapping[str, Any]) -> int | None:
        """The value of `sliding_window`, or None if windows are disabled."""
        fields = ConfigFields(values)
        enabled = self.kind in ("all", "alternating") or fields.flag(
            "use_sliding_window", self.kind == "none"
        )
        if not enabled or values.get("sliding_window", self.default) is None:
            return None
        if values.get("sliding_window") == 0 and self.kind.startswith("switched"):
            # transformers writes 0 for a window that is switched off.
            raise fields.wrong(
                "sliding_window", 0, "at least 1, because use_sliding_window is true"
            )
        return fields.integer("sliding_window", self.default)

    def _implied_kinds(self, values: Mapping[str, Any], layers: int, windowed: bool) -> list[str]:
        """The default of `layer_types`."""
        if not windowed or self.kind == "none":
            return [FULL] * layers
        if self.kind in ("all", "switched_all"):
            return [SLIDING] * layers
        if self.kind == "alternating":
            return [FULL if layer % 2 else SLIDING for layer in range(layers)]
        first = ConfigFields(values).integer(
            "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0
        )
        if self.kind == "switched_alternating":
            return [FULL if layer % 2 or layer >= first else SLIDING for layer in range(layers)]
        return [SLIDING if layer >= first else FULL for layer in range(layers)]

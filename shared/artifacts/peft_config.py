"""adapter_config.json as a struct, with everything this version cannot serve refused by field name."""

import re
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from shared.artifacts.reasons import RejectReason, rejected

# Initialisations that leave a plain LoRA behind; the others (PiSSA, OLoRA, CorDA, LoftQ) also change the base's weights.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
_REFUSED_FEATURES = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
_MAX_PATTERNS = 4096
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_MAX_PATTERN_CHARS = 512
_MAX_PATTERN_REPEATS = 2


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter's config says of its tensors; fields that change nothing at inference are left out."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: tuple[str, ...] | str | None = None  # a str is a regex or "all-linear"
    target_parameters: tuple[str, ...] = ()
    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_version: str | None = None

    def rank_of(self, module_name: str) -> int:
        return int(_lookup(self.rank_pattern, module_name, self.r))

    def scaling_of(self, module_name: str, rank: int) -> float:
        """The factor on B·A: alpha / r, or alpha / sqrt(r) with rsLoRA. `module_name` is without `base_model.model.`."""
        alpha = _lookup(self.alpha_pattern, module_name, self.lora_alpha)
        return alpha / rank**0.5 if self.use_rslora else alpha / rank


def read_config(path: Path) -> PeftConfig:
    """:raises AdapterRejected: bad_config, not_lora, dora, modules_to_save, bias, new_tokens, unsupported_feature."""
    return parse_config(path.read_bytes())


def parse_config(raw: bytes) -> PeftConfig:
    """:raises AdapterRejected: as read_config."""
    try:
        found: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise rejected(RejectReason.BAD_CONFIG, f"adapter_config.json is not JSON: {error}", field="$") from error
    if not isinstance(found, dict):
        _bad("$", type(found).__name__, "an object")  # pyright: ignore[reportUnknownArgumentType]
    config: dict[str, Any] = found  # pyright: ignore[reportUnknownVariableType]
    _refuse_unsupported(config)
    return PeftConfig(
        r=_positive_int("r", config.get("r")),
        lora_alpha=_number("lora_alpha", config.get("lora_alpha")),
        use_rslora=_flag("use_rslora", config.get("use_rslora")),
        rank_pattern={key: _positive_int(f"rank_pattern.{key}", n) for key, n in _pattern(config, "rank_pattern")},
        alpha_pattern={key: _number(f"alpha_pattern.{key}", n) for key, n in _pattern(config, "alpha_pattern")},
        target_modules=_modules(config.get("target_modules")),
        target_parameters=_names("target_parameters", config.get("target_parameters")),
        base_model_name_or_path=_text("base_model_name_or_path", config.get("base_model_name_or_path")),
        revision=_text("revision", config.get("revision")),
        peft_version=_text("peft_version", config.get("peft_version")),
    )


def _refuse_unsupported(config: dict[str, Any]) -> None:
    _refuse(config, "peft_type", RejectReason.NOT_LORA, allowed=("LORA",))
    _refuse(config, "use_dora", RejectReason.DORA, allowed=(None, False))
    _refuse(config, "modules_to_save", RejectReason.MODULES_TO_SAVE, allowed=(None, []))
    _refuse(config, "bias", RejectReason.BIAS, allowed=(None, "none"))
    _refuse(config, "lora_bias", RejectReason.BIAS, allowed=(None, False))
    _refuse(config, "trainable_token_indices", RejectReason.NEW_TOKENS, allowed=(None, [], {}))
    _refuse(config, "fan_in_fan_out", RejectReason.UNSUPPORTED_FEATURE, allowed=(None, False))
    for field in _REFUSED_FEATURES:
        _refuse(config, field, RejectReason.UNSUPPORTED_FEATURE, allowed=(None, False, [], {}))
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise rejected(
            RejectReason.UNSUPPORTED_FEATURE,
            f"init_lora_weights: {init!r} also changes the base's weights; convert the adapter to a plain LoRA with PEFT's "
            "path_initial_model_for_weight_conversion",
            field="init_lora_weights",
            got=init,
            expected=[True, False, *sorted(_PLAIN_INITS)],
        )


def _refuse(config: dict[str, Any], field: str, reason: RejectReason, allowed: tuple[Any, ...]) -> None:
    got = config.get(field)
    if got in allowed:
        return
    expected = allowed[-1] if len(allowed) == 1 else list(allowed)
    raise rejected(
        reason, f"adapter_config.json: {field} is {_short(got)}, expected {expected!r}", field=field, got=_short(got),
        expected=expected,
    )  # fmt: skip


def _bad(field: str, got: Any, expected: str) -> NoReturn:
    raise rejected(
        RejectReason.BAD_CONFIG,
        f"adapter_config.json: {field} is {_short(got)}, expected {expected}",
        field=field,
        got=_short(got),
        expected=expected,
    )


def _short(value: Any) -> str:
    return repr(value)[:200]


def _positive_int(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        _bad(field, value, "a positive integer")
    return value


def _number(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        _bad(field, value, "a number")
    return float(value)


def _flag(field: str, value: Any) -> bool:
    if value not in (None, True, False):
        _bad(field, value, "true or false")
    return bool(value)


def _text(field: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        _bad(field, value, "a string or null")
    return value or None


def _names(field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        _bad(field, value, "a list of names or null")
    items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
    return tuple(item if isinstance(item, str) else _bad(field, item, "a list of names") for item in items)


def _modules(value: Any) -> tuple[str, ...] | str | None:
    return value if value is None or isinstance(value, str) else _names("target_modules", value)


def _pattern(config: dict[str, Any], field: str) -> list[tuple[str, Any]]:
    """Entries whose keys are names or simple regexes: they come from users, and are matched against thousands of names."""
    value: Any = config.get(field) or {}
    if not isinstance(value, dict):
        _bad(field, value, "an object of module name to number")
    entries: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    if len(entries) > _MAX_PATTERNS:
        _bad(field, f"{len(entries)} entries", f"at most {_MAX_PATTERNS}")
    for key in entries:
        if _PLAIN_NAME.fullmatch(key):
            continue
        repeats = len(re.findall(r"(?<!\\)[*+{]", key))
        if len(key) > _MAX_PATTERN_CHARS or repeats > _MAX_PATTERN_REPEATS or re.search(r"\)[*+{?]", key):
            _bad(f"{field}.{key[:100]}", key, f"a name, or a regex with at most {_MAX_PATTERN_REPEATS} plain repeats")
        try:
            re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError) as error:
            _bad(f"{field}.{key[:100]}", key, f"a regex ({error})")
    return list(entries.items())


def _lookup(pattern: dict[str, Any], name: str, default: float) -> float:
    """PEFT's rule: the first key that matches the end of the name from a dot on."""
    if not pattern:
        return default
    suffixes = {name[at:] for at in _dot_starts(name)}
    for key, value in pattern.items():
        if _PLAIN_NAME.fullmatch(key):
            if key in suffixes:
                return value
        elif re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _dot_starts(name: str) -> list[int]:
    return [0, *(at + 1 for at, char in enumerate(name) if char == ".")]

"""Takes the unit off an answer and brings it into one spelling. Units are compared by name: nothing is converted."""

from __future__ import annotations

import re

PERCENT, DEGREE = "%", "°"

MAX_CHARACTERS = 200
"""A longer text is no value with a unit."""

_SYNONYMS = {
    name: unit
    for unit, names in {
        "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter", "m": "meter metre",
        "km": "kilometer kilometre kms", "inch": "in", "foot": "feet ft", "yard": "yd yds", "mile": "mi",
        "mg": "milligram", "g": "gram gm gramme", "kg": "kilogram kilo kgs", "ton": "tonne", "lb": "pound lbs",
        "oz": "ounce", "ml": "milliliter millilitre", "l": "liter litre", "gallon": "gal",
        "s": "second sec secs", "min": "minute mins", "h": "hour hr hrs", "ms": "millisecond", "week": "wk",
        "month": "mo", "year": "yr yrs", "dollar": "usd ¤ bucks", "euro": "eur €", "£": "gbp quid", "rupee": "₹ rs inr",
        "yen": "¥ jpy", "cent": "¢", "j": "joule", "n": "newton", "w": "watt", "v": "volt", "a": "ampere amp",
        "k": "kelvin", "hz": "hertz", "pa": "pascal", "kw": "kilowatt", "rad": "radian", DEGREE: "degree deg",
        "°c": "celsius", "°f": "fahrenheit", "person": "people", "child": "children", "man": "men", "woman": "women",
        "die": "dice", "mouse": "mice",
    }.items()
    for name in names.split()
}  # fmt: skip
_COMPOUND = {"mph": "mile/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "fps": "foot/s", "mps": "m/s"}
_SHORT = (
    "mm|cm|dm|km|in|ft|yd|yds|mi|mg|kg|kgs|gm|lb|lbs|oz|ml|mL|gal|sec|secs|min|mins|hr|hrs|ms|yr|yrs|mph|kph|kmh|kmph|"
    "fps|mps|Hz|kHz|Pa|kPa|kW|kWh|kJ|MB|GB|KB|TB|rad|cc|am|pm|AM|PM|USD|EUR|GBP"
)
_SINGLE = "[msghLNJWVAK]"
_POWER = r"(?:\s*\^\s*\{?\s*-?[1-4]\s*\}?)?"
_QUOTED = rf'"[^"]+"{_POWER}'
_WORDS = r"(?:sq\.?|cu\.?|[A-Za-z]{3,})(?:[ -]+[A-Za-z]+\.?){0,4}"
_PLAIN = rf"(?:{_WORDS}|(?<![A-Za-z])(?:{_SHORT})(?![A-Za-z])|(?<=[\s/]){_SINGLE}(?![A-Za-z])){_POWER}"
_ONE = rf"(?:{_QUOTED}|{_PLAIN})"
_TRAILING = re.compile(
    rf"""^(?P<body>.*?[\d)\]}}!°%\w.])\s*(?P<unit>(?<![A-Za-z\\]){_ONE}(?:\s*(?:/|\\cdot\b|"per"|\bper\b)?\s*{_ONE}){{0,3}})$""",
    re.DOTALL,
)
_SIGN = re.compile(r'^(?P<body>.*[\d)\]}])\s*(?P<unit>%|°(?:\s*"?[CF]"?(?:elsius|ahrenheit)?)?|[€£¥₹¢¤])$', re.DOTALL)
_PREFIX = re.compile(r'^(?P<sign>-?)\s*(?P<unit>[¤€£¥₹]|"?(?:Rs\.?|USD|EUR|GBP|INR)"?)\s*(?P<body>.+)$', re.DOTALL)
_NOT_UNITS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|frac|cdot|pi|infty|cup|cap|mathbb|and|or|if|for|where|mod|times|ways?of)\b"
)
_NUMBER_WORDS = frozenset({"hundred", "dozen"})
_DROPPED = "long tall wide deep high old away later ago total exactly approximately about of the a an each in"


def split_unit(text: str) -> tuple[str, str | None]:
    """(the rest, the unit in one spelling or None). A text without a number before the words has no unit."""
    unit: str | None = None
    if len(text) > MAX_CHARACTERS:
        return text, None
    match = _SIGN.match(text) or _TRAILING.match(text)
    if match and _is_unit(match["body"], match["unit"]):
        text, unit = match["body"].strip(), canonical(match["unit"])
    prefix = _PREFIX.match(text)
    if prefix:
        text = prefix["sign"] + prefix["body"].strip()
        unit = unit or canonical(prefix["unit"])
    return text, unit or None


def units_agree(a: str | None, b: str | None) -> bool:
    """Whether two units are one, or one side has none."""
    return a is None or b is None or a == b


def canonical(unit: str) -> str:
    """The unit in one spelling: singular, abbreviated, squares as ^2, "per" as /; empty for "unit" alone."""
    text = re.sub(r"\\cdot|\\", " ", unit.replace('"', " ")).strip()
    text = re.sub(r"(?<=°)\s*([CF])\w*", lambda m: m[1].lower(), text).lower()
    text = re.sub(r"\bdegrees?\s+(?=c|f)", "", text) if "celsius" in text or "fahrenheit" in text else text
    text = re.sub(r"\{|\}|\.", "", text)
    text = re.sub(r"\s*\bper\b\s*", "/", text)
    text = re.sub(r"\b(?:square|sq)[ -]*(\w+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu)[ -]+(\w+)", r"\1^3", text)
    text = re.sub(r"(\w+) squared\b", r"\1^2", text)
    text = re.sub(r"(\w+) cubed\b", r"\1^3", text)
    text = re.sub(r"\s*\^\s*", "^", text)
    words = [_singular(word) for word in re.findall(r"/|\^-?\d|[^\s/^]+", text) if word not in _DROPPED.split()]
    if any(word == "unit" for word in words):
        return ""
    joined = "".join(word if word in "/" or word.startswith("^") else f" {word}" for word in words)
    return _per_second(joined.replace("/ ", "/").strip())


def _per_second(unit: str) -> str:
    """The form "m s^-1" is "m/s", and "s^-2" is "/s^2"."""
    return re.sub(r"\s*\b([a-z]+)\^-(\d)", lambda m: f"/{m[1]}" + ("" if m[2] == "1" else f"^{m[2]}"), unit)


def _singular(word: str) -> str:
    for candidate in (word, word[:-2] if word.endswith("es") else word, word[:-1] if word.endswith("s") else word):
        if candidate in _COMPOUND:
            return _COMPOUND[candidate]
        if candidate in _SYNONYMS:
            return _SYNONYMS[candidate]
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def _is_unit(body: str, unit: str) -> bool:
    if unit.startswith(DEGREE) and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", body):
        return False  # sin 30° is a number
    if not re.search(r"\d|\\pi|\\frac|\\sqrt", body) or _NOT_UNITS.search(unit):
        return False
    return not (set(re.findall(r"[a-z]+", unit)) & _NUMBER_WORDS)

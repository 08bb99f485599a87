r"""Brings one answer, LaTeX or plain, into one spelling, which the readers of structure and values expect.

Words from \text{...} and its kind come out in double quotes: 5\text{ cm} is 5 "cm". "and", "or" and "," separate.
Dollars of money are "¤", degrees are "°".
"""

# ruff: noqa: RUF001 (telling look-alikes apart is what this file does)
from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ",
        "÷": "/", "∕": "/", "⁄": "/", "∶": ":", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
        "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "ø": r"\emptyset ",
        "º": "°", "˚": "°", "±": r"\pm ", "∓": r"\mp ", "≈": r"\approx ", "√": r"\sqrt ", "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
        "γ": r"\gamma ", "δ": r"\delta ", "λ": r"\lambda ", "μ": r"\mu ", "µ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ",
        "ϕ": r"\phi ", "ω": r"\omega ", "⟨": r"\langle ", "⟩": r"\rangle ", "“": '"', "”": '"', "’": "'", "′": "'",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\u2061": "", "\ufeff": "", "，": ",", "；": ";",
        "（": "(", "）": ")", "：": ":", "％": "%",
    }
)  # fmt: skip
_TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|bb|cal)|operatorname\*?|mbox|hbox|rm|bf|boldsymbol|bm)"
    r"\s*\{([^{}]*)\}"
)
_OLD_FONT = re.compile(r"\{\\(?:rm|bf|it)\s+([^{}]*)\}")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def _scaled(match: re.Match[str]) -> str:
    return f"\\cdot 10^{{{_SCALES[match[1]]}}}"


def _repeating(match: re.Match[str]) -> str:
    r"""0.1\overline{6} is (16 - 1) / 90."""
    whole, fixed, repeated = match[1] or "0", match[2], match[3]
    digits = int(whole + fixed + repeated) - int(whole + fixed)
    return f"\\frac{{{digits}}}{{{(10 ** len(repeated) - 1) * 10 ** len(fixed)}}}"


_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\m?(?:left|right|[Bb]igg?[lrm]?)(?=\s*(?:[\[\]().|/]|\\[{}|a-z]))\s*\.?(?![0-9])", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|centering|hfill|ensuremath|strut)(?![A-Za-z])", " "),
        (r"(?<=\d)(?:\\[,!: ]|\{,\}|\\,\\!|,\\!)(?=\d{3}(?!\d))", ","),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"(?<!\\)\\(?:[,;:! ]|quad|qquad|thinspace|enspace|hspace\{[^}]*\})|~|\\phantom\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])|\\choose(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:times|ast|bullet)(?![A-Za-z])", r"\\cdot "),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\\(?:approxeq|simeq)(?![A-Za-z])|\\sim(?![A-Za-z])|~=", r"\\approx "),
        (r"\\(?:lbrace|rbrace)(?![A-Za-z])", lambda m: r"\{" if m[0][1] == "l" else r"\}"),
        (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:backslash|smallsetminus)(?![A-Za-z])", r"\\setminus "),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\slash(?![A-Za-z])", "/"),
        (r"\\(?:land|wedge)(?![A-Za-z])", " and "),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r'\\frac\s*\{\s*"([^"]*)"\s*\}\s*\{\s*"([^"]*)"\s*((?:\^\S+?)?)\s*\}', r'"\1/\2\3"'),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])|\\(?:textdegree|deg)(?![A-Za-z])", "°"),
        (r"(?<!\\)\\(?=[%#&_])", ""),
        (r"\\(?:euro|texteuro)(?![A-Za-z])", "€"),
        (r"\\(?:pounds|textsterling)(?![A-Za-z])", "£"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"(?<![\\A-Za-z])sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])sqrt\s*(?=[({])", r"\\sqrt "),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(alpha|beta|theta|lambda)(?![A-Za-z])", r"\\\1 "),
        (r"\s*(?<![A-Za-z\\])(?:percent|percentage|per cent|pct)(?![A-Za-z])", "%"),
        (r"(?<=[\d)}])\s*(?:degrees?|deg)(?![A-Za-z])(?!\s*(?:[CF]\b|[Cc]elsius|[Ff]ahrenheit))", "°"),
        (r"(?<![\d.eE])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\d.A-Za-z])", r"\1\\cdot 10^{\2}"),
        (r'(?<=\d)\s*"?\s*(thousand|million|billion|trillion)(?![A-Za-z])\s*"?', _scaled),
        (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _repeating),
        (r"(?<![\d.])(\d*)\.(\d*)\((\d+)\)(?!\s*[\d(])", _repeating),
    )
)  # fmt: skip
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+|/\d+)?")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/}^] )(?<![\d.,/}^])\b\d{1,3}(?: \d{3})+\b(?! ?[\d/,])")
_MIXED = re.compile(r"(?<![\d.^_{}])(?<!frac)(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_PLAIN_MIXED = re.compile(r"(?<![\d.^_/])(\d+)(?:\s+|-|\s+and\s+|\s*&\s*)(\d+)/(\d+)(?![\d.])")
_FRACTIONS = re.compile(r"(\d*)\s*([½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")


@lru_cache(maxsize=4096)  # a gold is compared with every response of its group, and many answers are alike
def normalise(text: str) -> str:
    """One spelling for one answer; thousands keep their commas (`without_thousands`)."""
    if _PLAIN_NUMBER.fullmatch(text):
        return text
    text = _FRACTIONS.sub(_unicode_fraction, text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
    text = _without_delimiters(text)
    text = _OLD_FONT.sub(_quoted, text)
    for _ in range(2):  # \textbf{\text{A}}
        text = _TEXT.sub(_quoted, text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _mixed_numbers(text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?:\s|[,;:.]|\\\\|\\newline)+$", "", text)
    return _whole_quote(text)


def without_thousands(text: str) -> str:
    """1,234,567 and 1 234 567 as 1234567. Commas count as such only before exactly three digits, without a space."""
    text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    return _SPACED_THOUSANDS.sub(lambda m: m[0].replace(" ", ""), text)


def _without_delimiters(text: str) -> str:
    text = re.sub(r"\\\$", "¤", text)
    text = re.sub(r"(?<!\\)\\[()]|(?<!\\)\\\[(?!\d*\.?\d*(?:pt|em|ex)\])|(?<!\\)\\\]", " ", text)
    text = re.sub(r"\*\*(?=\S)(.+?)(?<=\S)\*\*(?!\s*\d)", r"\1", text)
    text = text.replace("$$", " ").strip("`")
    if text.count("$") % 2 == 1 or re.fullmatch(r"\s*-?\$\s*[\d.,]+\s*", text):
        text = re.sub(r"\$(?=\s*[-\d.])", "¤", text, count=1)
    return text.replace("$", " ")


def _quoted(match: re.Match[str]) -> str:
    command, words = match[0], match[1].strip(" ~")
    if not words:
        return " "
    if command.startswith((r"\mathbb", r"\mathcal")):
        return f" \\mathbb{words} " if len(words) == 1 else words
    if words in ("e", "i", "d", "π") and command.startswith((r"\mathrm", r"\operatorname", r"\text", r"{")):
        return f" {words} "
    if command.startswith((r"\mathbf", r"\mathit", r"\boldsymbol", r"\bm", r"\bf")) and not re.search(
        r"[a-z]{2}", words
    ):
        return f" {words} "
    if re.fullmatch(r",?\s*(?:and|or|and/or)\s*,?", words):
        return f" {words} "
    if not re.search(r"[A-Za-z]", words) or '"' in words:
        return f" {words} "
    if re.fullmatch(r"sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|gcd|lcm|det", words):
        return f" \\{words} "
    lead = re.match(r",?\s*(and|or)\s+(.*)|(.*?)\s*,?\s+(and|or)$", words)
    if lead:
        return f' {lead[1]} "{lead[2]}" ' if lead[1] else f' "{lead[3]}" {lead[4]} '
    return f' "{words}" '


def _whole_quote(text: str) -> str:
    """A text that is nothing but quoted words stands without quotes: "(B)" is (B)."""
    match = re.fullmatch(r'\(?\s*"([^"]*)"\s*\)?', text)
    return match[1].strip(" .") if match else text


def _mixed_numbers(text: str) -> str:
    text = _MIXED.sub(
        lambda m: (
            f"({m[1]}+\\frac{{{m[2]}}}{{{m[3]}}})" if int(m[2]) < int(m[3]) else f"{m[1]}\\cdot {m[0][len(m[1]) :]}"
        ),
        text,
    )
    return _PLAIN_MIXED.sub(lambda m: f"({m[1]}+{m[2]}/{m[3]})" if int(m[2]) < int(m[3]) else m[0], text)


def _unicode_fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[2]).partition("⁄")
    return f"{match[1]} {top}/{bottom}" if match[1] else f"{top}/{bottom}"

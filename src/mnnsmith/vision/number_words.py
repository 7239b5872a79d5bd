"""Numbers in English words, as a video's prompt names its number of frames."""

from __future__ import annotations

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_words(number: int) -> str:
    """0 to 999,999 in words, spelled as the package num2words does: `one hundred and sixty-four`.

    Raises ValueError for another number.
    """
    if not 0 <= number < 1_000_000:
        raise ValueError(f"{number} is not between 0 and 999999")
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[rest]}" if rest else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_SMALL[hundreds]} hundred" + (f" and {number_words(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    joined = " and " if rest < 100 else ", "
    return f"{number_words(thousands)} thousand" + (joined + number_words(rest) if rest else "")

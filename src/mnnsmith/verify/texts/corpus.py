"""Texts on which two tokenizers are compared: over ten thousand, always the same, made up here.

Each maker below stands for a way in which texts are hard: scripts, joined emoji, runs of spaces,
control characters, numbers, code, the control tokens of all families typed by a user, and bytes
that were no text.  A generator with a fixed seed mixes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

_SEED = 20240229

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "I'll say we've won; they're sure she'd agree, and I'm glad it's over.",
    "WE'LL SEE WHAT THEY'VE DONE, HE'D SAID. It’s not that I can’t…",
    "Füße, Äpfel und große Straßenbäume kosten 3,50 € — „ganz schön teuer“!",
    "L’été dernier, nous avons mangé des œufs à la crème brûlée, n’est-ce pas ?",
    "¿Dónde está el niño? ¡Mañana será otro día, señor Muñoz!",
    "Não há coração que resista à saudade dos avós.",
    "Zażółć gęślą jaźń, Łódź i Kraków są piękne.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Árvíztűrő tükörfúrógép; a hétvégén elutazunk.",
    "İstanbul'da ılık bir akşam, ığdır ve İzmir.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Їжак з’їв яблуко біля ґанку.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία σας, ὦ ἄνδρες Ἀθηναῖοι.",
    "שלום עולם, מה שלומך היום? בְּרֵאשִׁית בָּרָא",
    "مرحبا بالعالم، كيف حالك اليوم؟ السَّلامُ عَلَيْكُم ١٢٣",
    "سلام دنیا، می‌خواهم کتاب‌هایم را بخوانم ۴۵۶",
    "नमस्ते दुनिया, आप कैसे हैं? क्षत्रिय १२३",
    "বাংলা ভাষা খুব সুন্দর ৪৫৬",
    "வணக்கம் உலகம், எப்படி இருக்கிறீர்கள்?",
    "తెలుగు భాష చాలా మధురమైనది",
    "ಕನ್ನಡ ಭಾಷೆ ಮತ್ತು ಮಲಯಾളം ഭാഷ",
    "ඔබට කොහොමද? සිංහල",
    "สวัสดีชาวโลก วันนี้อากาศดีมาก ๒๕๖๗",
    "ສະບາຍດີຊາວໂລກ",
    "မင်္ဂလာပါ ကမ္ဘာလောက",
    "សួស្តីពិភពលោក",
    "བཀྲ་ཤིས་བདེ་ལེགས།",
    "გამარჯობა მსოფლიო, როგორ ხარ?",
    "Բարեւ աշխարհ, ինչպե՞ս ես։",
    "ሰላም ልዑል፣ እንዴት ነህ? ፩፪፫",
    "你好，世界！今天天气怎么样？我想买３个苹果。",
    "繁體中文與簡體中文有所不同，「引號」也不一樣。",
    "こんにちは世界、カタカナとひらがなと漢字です。ﾊﾝｶｸ",
    "안녕하세요 세계, 오늘 날씨가 어떻습니까?",
    "Xin chào thế giới, hôm nay trời đẹp quá nhỉ?",
    "Ẹ káàárọ̀, báwo ni o ṣe wà lónìí?",
    "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ and ᓄᓇᕗᑦ and ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "𐍅𐌿𐌻𐍆𐌹𐌻𐌰 𝕳𝖊𝖑𝖑𝖔 𝒲ℴ𝓇𝓁𝒹 𓀀𓂀 𒀀𒁀 🄰🅱",
    "E = mc², ∀x∈ℝ: ⌈x⌉ ≥ x ∧ ∑ᵢ aᵢ ≠ ½·√π → ∞, x₁⁺ − ⅓",
    "№ 5 § 12 ¶ 3 † ‡ • ‰ ™ © ® ª º Ⅷ ⅻ ① ㈱ ㌔ ﬁ ﬂ ĳ ǆ",
    "Åse’s naïve café coöperates; rôle, façade, Œuvre, Æsir, Þórr, ðe",
)

_CODE = (
    'def f(x: int, *a, **k) -> list[int]:\n    """Doc."""\n'
    "    return [i**2 for i in range(x) if i % 2]\n",
    '#include <stdio.h>\nint main(void) {\n\tprintf("%d\\n", 0x7fff << 2);\n\treturn 0;\n}\n',
    'fn main() { let v: Vec<&\'static str> = vec!["a", "b"]; println!("{v:?}"); }',
    "const f = async (x) => { await fetch(`/api/${x}?q=1&r[]=2`); };\n// don't",
    "SELECT a.id, COUNT(*) FROM t AS a WHERE a.name LIKE '%o''b%' GROUP BY 1;",
    "<!DOCTYPE html>\n<div class=\"x-y\" id='z'>&nbsp;&#8212;</div>\n<!-- it's -->",
    '{"key": [1, 2.5e-10, true, null, "\\u00e9\\n"], "n": {"a": -0}}',
    'for i in $(seq 1 10); do echo "$i" >> ~/out.txt 2>&1 || exit $?; done',
    "\\begin{align*} \\frac{\\partial f}{\\partial x} &= \\sum_{i=0}^{n} x_i \\\\ \\end{align*}",
    "public static <T extends Comparable<T>> T max(List<? super T> l) { return null; }",
    "key: value\nlist:\n  - one\n  - two: {a: 1}\n# comment's end\n...\n",
    "SGVsbG8gd29ybGQh+/== 0xDEADBEEF deadbeef-1234-5678-9abc-def012345678",
    "https://example.org:8080/a/b%20c/?x=1&y=~z#frag user.name+tag@mail.example.com",
    "C:\\Users\\me\\file.txt /usr/local/bin/../lib ./a.out --flag=on -xvf",
    "| a | b |\n|---|:-:|\n| 1 | **2** |\n\n> quote\n\n1. item\n   * sub `code`\n",
)

_CONTROL_TOKENS = tuple(
    word
    for line in (
        "<|im_start|> <|im_end|> <|endoftext|> <s> </s> <unk> <pad> <bos> <eos> <mask>",
        "<|begin_of_text|> <|end_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|>",
        "<|python_tag|> <start_of_turn> <end_of_turn> <start_of_image> <|user|>",
        "<|assistant|> <|system|> <|end|> [INST] [/INST] <<SYS>> <</SYS>> [TOOL_CALLS]",
        "[AVAILABLE_TOOLS] [CLS] [SEP] [MASK] [UNK] [PAD] <think> </think> <tool_call>",
        "</tool_call> <|fim_prefix|> <|fim_middle|> <|vision_start|> <|image_pad|> <image>",
        "<|file_sep|> <0x0A> <0x41> <0xE4> <|reserved_special_0|> <｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <extra_id_0> ▁ ▁▁ Ġ Ċ ##ing",
    )
    for word in line.split()
)

_EMOJI = tuple(
    word
    for line in (
        "😀 😂 ❤\ufe0f ❤ 👍🏽 👩\u200d👩\u200d👧\u200d👦 👨🏿\u200d🚀",
        "🏳\ufe0f\u200d🌈 🏴\u200d☠\ufe0f 🇩🇪 🇯🇵🇧🇷 🇺 1\ufe0f⃣ #\ufe0f⃣ 🧑🏻\u200d🤝\u200d🧑🏿",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f ☕ ☕\ufe0f ☎\ufe0e",
        "✈\ufe0f 🫠 🪿 🈶 🀄 ♠ 🤷🏼\u200d♀\ufe0f 🐻\u200d❄\ufe0f ⛹🏾\u200d♂\ufe0f",
    )
    for word in line.split()
)

_SPACES = (
    " ",
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u2009",
    "\u200a",
    "\v",
    "\f",
)
_ODD_SPACES = ("\u0085", "\u2028", "\u2029", "\u1680", "\u202f", "\u205f", "\u180e")
_INVISIBLE = (
    "\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066"
    "\u2069\ufeff\u00ad\u034f\u061c"
)
_MARKS = (
    "\u0300\u0301\u0302\u0303\u0304\u0307\u0308\u030a\u030c\u0323\u0327\u0328"
    "\u0331\u0336\u20dd\u20e3"
)
_SCRIPT_STARTS = (
    0x00C0, 0x0100, 0x0180, 0x0250, 0x02B0, 0x0370, 0x0400, 0x0530, 0x0590, 0x0600, 0x0700,
    0x0780, 0x0900, 0x0980, 0x0A00, 0x0A80, 0x0B00, 0x0B80, 0x0C00, 0x0C80, 0x0D00, 0x0D80,
    0x0E00, 0x0E80, 0x0F00, 0x1000, 0x10A0, 0x1100, 0x1200, 0x13A0, 0x1400, 0x1680, 0x16A0,
    0x1780, 0x1800, 0x1D00, 0x1E00, 0x1F00, 0x2000, 0x2070, 0x20A0, 0x2100, 0x2150, 0x2190,
    0x2200, 0x2300, 0x2460, 0x2500, 0x25A0, 0x2600, 0x2700, 0x27C0, 0x2800, 0x2900, 0x2C00,
    0x2D30, 0x2E80, 0x3000, 0x3040, 0x30A0, 0x3100, 0x3130, 0x3200, 0x3300, 0x3400, 0x4E00,
    0x5B00, 0x6C00, 0x7F00, 0x9F00, 0xA000, 0xA4D0, 0xA700, 0xA840, 0xAC00, 0xC500, 0xD700,
    0xE000, 0xF900, 0xFB00, 0xFE00, 0xFF00, 0x10000, 0x10300, 0x10400, 0x10900, 0x10D30,
    0x11000, 0x12000, 0x13000, 0x16A40, 0x1B000, 0x1D100, 0x1D400, 0x1E900, 0x1EE00, 0x1F000,
    0x1F100, 0x1F300, 0x1F600, 0x1F680, 0x1F900, 0x20000, 0x2A700, 0x2F800, 0x30000, 0xE0020,
    0xE0100, 0xF0000, 0x10FF00,
)  # fmt: skip


def corpus_strings() -> list[str]:
    """At least 10,000 distinct texts without surrogates or U+0000, the same in every run."""
    random = Random(_SEED)
    seen: dict[str, None] = {}
    for maker in (_plain, _pieces, _scripts, _runs, _numbers, _typed_tokens, _emoji, _marks):
        seen.update(dict.fromkeys(maker(random)))
    for maker in (_invisible, _controls, _lost_bytes, _every_ascii_pair, _mixtures, _long):
        seen.update(dict.fromkeys(maker(random)))
    return [text for text in seen if "\0" not in text]


_Maker = Callable[[Random], Iterator[str]]


def _plain(random: Random) -> Iterator[str]:
    yield ""
    for text in (*_SENTENCES, *_CODE):
        yield text
        yield text.upper()
        yield text.lower()
        yield " " + text
        yield text + "\n"
        yield text.replace(" ", "  ")
        yield text.replace(" ", "")
        yield text[::-1]


def _pieces(random: Random) -> Iterator[str]:
    """Parts of sentences, so that texts start and end anywhere."""
    for text in (*_SENTENCES, *_CODE):
        for _ in range(14):
            start = random.randrange(len(text))
            yield text[start : start + random.randrange(1, 24)]
        yield from text.split()


def _scripts(random: Random) -> Iterator[str]:
    """Characters of every block, alone, in a row, and behind a space, a letter and a digit."""
    for start in _SCRIPT_STARTS:
        block = [chr(start + offset) for offset in range(96)]
        block = [char for char in block if not 0xD800 <= ord(char) < 0xE000]
        for char in random.sample(block, 6):
            yield char
            yield f"a {char}b1{char}"
        yield "".join(block[:24])
        yield " ".join(random.sample(block, 8))
        yield "".join(random.choices(block, k=10)) + "."


def _runs(random: Random) -> Iterator[str]:
    """Runs of one character, alone and between words."""
    for char in (*_SPACES, *_ODD_SPACES, *"-=_.*#~!?aA0é中😀▁/\\'\""):
        for length in (1, 2, 3, 4, 7, 8, 16, 33, 100):
            yield char * length
            yield f"x{char * length}y"
            yield f"{char * length}z {char}"
    for _ in range(400):
        yield "".join(random.choices((*_SPACES, "a", "B", "1", "."), k=random.randrange(2, 12)))


def _numbers(random: Random) -> Iterator[str]:
    for digits in range(1, 22):
        value = random.randrange(10**digits)
        yield f"{value}"
        yield f"{value:,}"
        yield f"-{value} +{value}.{value % 97} {value}e-{digits}"
        yield f"${value} {value}% #{value} v{value}.{digits}.0 {value}th {value:x}"
    for _ in range(150):
        year, month, day = (
            random.randrange(1900, 2100),
            random.randrange(1, 13),
            random.randrange(29),
        )
        yield f"{year}-{month:02}-{day:02}T{random.randrange(24)}:{random.randrange(60):02}"
        yield "".join(random.choices("0123456789٠١٢٣४५६७²³½Ⅷ①０１", k=random.randrange(1, 9)))


def _typed_tokens(random: Random) -> Iterator[str]:
    """Control tokens of all families, whole, cut and glued, as a user may type them."""
    for token in _CONTROL_TOKENS:
        yield token
        yield f"{token}{token}"
        yield f"hi{token}there"
        yield f" {token} "
        yield f"\n{token}\nuser\n"
        yield f"{token}\u3000  x  {token}"
        yield token[:-1]
        yield token[1:]
        yield token.upper()
        yield token.lower()
        yield f"{token[:3]} {token[3:]}"
    for _ in range(400):
        words = random.choices((*_CONTROL_TOKENS, "user", "Hello", "\n", " ", "."), k=6)
        yield "".join(words)


def _emoji(random: Random) -> Iterator[str]:
    for emoji in _EMOJI:
        yield emoji
        yield f"ok{emoji}!"
        yield f" {emoji} {emoji}{emoji}"
    for _ in range(250):
        yield "".join(random.choices((*_EMOJI, " ", "a", "!"), k=random.randrange(2, 7)))


def _marks(random: Random) -> Iterator[str]:
    """Letters with marks behind them, as other systems write é; also too many marks."""
    for _ in range(300):
        letters = random.choices("aeiouncszyAEOUαωие", k=random.randrange(1, 6))
        yield "".join(letter + random.choice(_MARKS) for letter in letters)
        yield "".join(letter + "".join(random.sample(_MARKS, 2)) for letter in letters[:3])
    for _ in range(60):
        yield "a" + "".join(random.choices(_MARKS, k=random.randrange(3, 12)))
        yield "".join(chr(random.randrange(0x1100, 0x11FF)) for _ in range(random.randrange(1, 7)))
    for char in "ÅΩK\u2126\u212a\u212bﬁﬃ①²ｱｶﾞ㍿豈\U0002f800\u0958\u0344ſẛ̣ßẞİıΣς":
        yield char
        yield f"pre{char}post {char}"


def _invisible(random: Random) -> Iterator[str]:
    for char in (*_INVISIBLE, *_ODD_SPACES, "\ufffd", "\ufffc", "\ue000", "\uf8ff", "\ufdd0"):
        yield char
        yield f"a{char}b"
        yield f"{char} word {char}{char}"
    for _ in range(200):
        yield "".join(random.choices((*_INVISIBLE, *"ab שלוםمرحبا 1"), k=random.randrange(2, 10)))


def _controls(random: Random) -> Iterator[str]:
    for point in (*range(1, 32), *range(127, 160)):
        yield chr(point)
        yield f"a{chr(point)}b {chr(point)}1{chr(point)}."
    for _ in range(150):
        yield "".join(chr(random.randrange(1, 128)) for _ in range(random.randrange(2, 14)))


def _lost_bytes(random: Random) -> Iterator[str]:
    """Random bytes read as UTF-8, and as Latin-1."""
    for _ in range(900):
        data = random.randbytes(random.randrange(1, 24)).replace(b"\0", b"a")
        yield data.decode("utf-8", "replace")
        yield data.decode("latin-1")
    for text in _SENTENCES:
        data = text.encode("utf-8")
        start = random.randrange(len(data))
        yield data[start : start + random.randrange(1, 20)].decode("utf-8", "replace")


def _every_ascii_pair(random: Random) -> Iterator[str]:
    """Each printable ASCII character behind some others: where patterns cut."""
    for char in map(chr, range(32, 127)):
        for other in random.sample("aZ5 .'\"(_-\n$\té中😀", 9):
            yield f"{other}{char}x {char}{other}{char}"


def _mixtures(random: Random) -> Iterator[str]:
    """Texts with parts of everything."""
    words = [word for text in (*_SENTENCES, *_CODE) for word in text.split(" ")]
    pools = (words, words, words, _EMOJI, _CONTROL_TOKENS, _SPACES, ("12", "3.5", "it's", "'ll"))
    for _ in range(2200):
        parts = (random.choice(random.choice(pools)) for _ in range(random.randrange(2, 12)))
        yield random.choice(("", " ", " ")).join(parts)


def _long(random: Random) -> Iterator[str]:
    for _ in range(12):
        yield " ".join(random.choices(_SENTENCES, k=12))
    yield "word " * 400
    yield "好" * 700
    yield "\n\n" * 200 + "end"

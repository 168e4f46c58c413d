"""Trains the embedded tokenizer: `python -m cluster.train_tokenizer [--out DIR]`.

Text of ours, made by a small grammar under a fixed seed: prose of support chats, code, JSON of tool calls, a little of
other scripts. Byte-level BPE with the pre-tokenizer that Qwen's tokenizers use, ChatML markers as special tokens. The
same script gives the same bytes. A changed tokenizer is another namespace of fingerprints: do not change it lightly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

OUT = Path(__file__).parent.parent / "ranvier_py" / "data" / "tokenizer"
VOCABULARY = 8192
"""Small enough for a file of a few hundred kB, large enough that English costs about four characters a token."""

SENTENCES = 24_000  # enough that each word form below occurs often; more changes nothing but the time
SEED = 20_260_301
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LEARNED_TOKENS = ("<tool_call>", "</tool_call>", "<tools>", "</tools>")  # one token each, but may be said by anyone

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pre-tokenizer of Qwen2 and its successors: words with their leading blank, single digits, runs of signs."""


def words(text: str) -> list[str]:
    return text.split()


FUNCTION_WORDS = words("""
the a an and or but if then else when while because so as than that this these those there here it its he she they we
you i me my your our their his her him them us who whom whose which what where why how not no yes of in on at to from
by with without within into onto over under above below between among through across after before since until during
about against for toward upon off out up down again once only also very much many more most less least few some any
each every all both either neither other another such same own just still yet already always never often sometimes
usually is are was were be been being am do does did done doing have has had having can could will would shall should
may might must let please thanks
""")

VERBS = words("""
accept add adjust agree allow answer apply arrive ask assign balance block book break bring build buy call cancel
carry catch change charge check choose claim clean clear close collect compare complete compute confirm connect
consider contain continue convert copy correct cost count cover create cut decide delay delete deliver depend describe
design detect develop differ discuss divide draw drive drop earn edit enable end enter evict examine exchange expect
explain extend fail fetch fill filter find finish fix follow forget form forward gain gather generate give grant group
grow guess handle happen hash hear help hold improve include increase inform insert inspect install join jump keep
know last launch lead learn leave limit link list listen load lock look lose maintain make manage mark match mean
measure meet merge miss move name need note notice obtain offer open order own pack parse pass pause pay permit pick
place plan play point prefer prepare present prevent print process produce prompt propose protect prove provide pull
push put queue raise reach read receive record recover reduce refer refresh refund refuse relate release rely remain
remember remove render repair repeat replace reply report request require reserve reset resolve respond restart
restore result retry return review route run save schedule search see seem select send separate serve set share ship
show sign sit skip solve sort speak split stand start state stay stop store stream submit suggest supply support
switch take talk teach tell test think throw trace track train transfer translate travel trust try turn understand
update use vary verify view visit wait walk want warn watch wish work write
""")

NOUNS = words("""
access account action address agent airline airport amount answer area array article attempt attention author backend
bag balance bank batch behaviour block board body book boundary branch bridge budget buffer bug builder business byte
cache calendar card case cause centre chain chance change channel chapter character chat child choice city claim class
client clock cloud cluster code collection colour column command comment company computer condition connection content
context control conversation copy core corner cost counter country course credit customer data date day deadline
decision default degree delay delivery depth design detail device difference digest direction discount disk distance
document door driver edge effect effort element email end engine entry epoch error event evidence example exception
expert express fact failure family fare feature fee field file attempt flow folder food force form frame friend
function future garden gate gateway goal gossip government group guest half hand hash head header health heart help
history holder home hotel hour house idea identity image index industry information input instance insurance interest
interface issue item job journey key kind language latency law layer leaf length letter level library life light limit
line link list load local lock log loss luggage machine manager map margin market market master match measure meeting
member memory message meter method middle minute mirror mode model moment money month morning mountain name nature
network night node noise note number object office opinion option order origin output owner package packet page paper
parent part partner passenger path payment peer people percent period person phone picture piece place plan player
point policy port position power prefix present pressure price problem process product profile program project prompt
protocol proof purpose quality query question queue range rate reader reason receipt record reference region relation
reply report request reservation resource response rest result return reward risk river road role room root round
route router row rule sample scale schedule school science score screen seat second secret section seed segment sense
sequence series server service session set shape share shop side sign signal size source space speed stage standard
state station statistic step storage store story stream street string structure student subject success suffix summary
supply support surface switch symbol system table tail target task teacher team term test text theory thing thread
threshold ticket time title token tool top topic total trace traffic train traveller tree trip trust truth type unit
update use user value variable version view visit voice volume warning water way weather week weight window winner
wire wood word worker world writer year zone
""")

DESCRIBERS = words("""
able active actual additional available average bad basic best better big black blue bright broken busy central
certain cheap clean clear cold common complete complex constant correct current daily dark dead deep different direct
dirty double dry early easy empty entire equal exact expected extra fair false fast final fine first fixed flat free
fresh friendly full general global good great green happy hard healthy heavy helpful hidden high honest hot huge idle
important independent initial internal kind known large last late left likely limited linear little local logical long
loose low main major maximum mean median minimum minor missing modern narrow natural near necessary new next nice
normal obvious old open optional ordinary original outer parallel past perfect physical plain pleasant poor popular
possible present previous primary private proper public pure quick quiet random rapid rare raw ready real recent red
regular related reliable remote rich right rough round safe scarce second secure separate serious shallow sharp short
significant silent similar simple single slow small smart smooth soft solid special specific stable stale standard
steady still strange strict strong sudden sufficient sure temporary thin tight tiny total true typical unique unknown
upper useful usual valid various vast virtual visible warm weak white whole wide wild wrong young
""")

NAMES = words("""
Alice Amara Anders Anna Aoki Ben Bruno Carla Chen Clara Daniel David Elena Emma Farid Fatima George Grace Hana Hugo
Ines Ivan Jack James Jonas Julia Kai Kofi Lena Liam Lucia Maria Marta Maya Mei Mohamed Nadia Noah Nora Olga Omar Paul
Pedro Priya Rosa Sam Sara Sofia Tariq Tom Uma Victor Wei Yuki Zoe Amsterdam Athens Berlin Boston Cairo Chicago Delhi
Denver Dublin Geneva Hamburg Lagos Lima Lisbon London Madrid Miami Milan Nairobi Oslo Paris Porto Prague Rome Seoul
Seattle Sydney Tokyo Toronto Vienna Warsaw Zurich January February March April June July August September October
November December Monday Tuesday Wednesday Thursday Friday Saturday Sunday English French German Spanish Python Linux
""")

KEYWORDS = words("""
def class return if elif else for while in not and or import from as with try except raise None True False self
""")
OTHER_SCRIPTS = (
    "¿Dónde está la habitación? El vuelo llegará mañana por la tarde.",
    "Où est la gare ? Le train arrive bientôt, merci beaucoup.",
    "Wo ist der nächste Bahnhof? Das Gepäck kommt später, danke schön.",
    "Привет, как дела? Спасибо за помощь.",
    "你好，请问今天的天气怎么样？谢谢你的帮助。",  # noqa: RUF001 - a sample of the script
    "こんにちは、予約を変更したいです。ありがとうございます。",
    "naïve café — “quoted” … ‘single’ – 20 € ≤ 30 £ → ✓ 😀 👍",  # noqa: RUF001 - typographic signs on purpose
)


class Grammar:
    """Endless text from the word lists. All is drawn from one seeded generator: the text is always the same."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def verb(self) -> str:
        return inflected(self.rng.choice(VERBS), self.rng.choice(("", "", "s", "ed", "ing", "er", "able")))

    def noun(self) -> str:
        return inflected(self.rng.choice(NOUNS), self.rng.choice(("", "", "s")))

    def describer(self) -> str:
        return inflected(self.rng.choice(DESCRIBERS), self.rng.choice(("", "", "", "ly", "ness")))

    def clause(self) -> str:
        function = [self.rng.choice(FUNCTION_WORDS) for _ in range(4)]
        words = [function[0], self.describer(), self.noun(), function[1], self.verb(), function[2], self.noun()]
        if self.rng.random() < 0.3:
            words.append(self.rng.choice(NAMES))
        if self.rng.random() < 0.2:
            words.append(self.number())
        return " ".join([*words, function[3], self.verb()])

    def number(self) -> str:
        return self.rng.choice(("{:d}", "{:.2f}", "${:d}", "{:d} %", "{:d} ms", "2026-{:02d}-01")).format(
            self.rng.randrange(1, 1000)
        )

    def sentence(self) -> str:
        text = self.rng.choice((", ", "; ", " and ", " - ")).join(
            self.clause() for _ in range(self.rng.randrange(1, 3))
        )
        return text[0].upper() + text[1:] + self.rng.choice((".", ".", ".", "?", "!", ":\n", ".\n", ".\n\n"))

    def code(self) -> str:
        name, value, other = (f"{self.rng.choice(VERBS)}_{self.rng.choice(NOUNS)}" for _ in range(3))
        word = self.rng.choice(KEYWORDS)
        return self.rng.choice(
            (
                f"def {name}(self, {value}: int) -> str:\n    return self.{other}[{value}]\n\n",
                f"    if {value} {word} {other}:\n        {name}({value}, {other}={self.number()})\n",
                f"class {name.title().replace('_', '')}:\n    {value}: list[str] = []\n",
                f"for {value} in {name}({other}):\n    print(f'{{{value}}}')\n",
                f"# {self.clause()}\nimport {value}\n```python\n{name} = {value}.{other}()\n```\n",
                f"| {self.noun()} | {self.noun()} |\n|---|---|\n| {self.number()} | {self.number()} |\n- **{name}**: ",
            )
        )

    def call(self) -> str:
        arguments = {self.noun(): self.rng.choice((self.noun(), self.rng.randrange(100), [self.verb()], True, None))}
        name = f"{self.rng.choice(VERBS)}_{self.rng.choice(NOUNS)}"
        parameters = {"type": "object", "properties": {self.noun(): {"type": "string", "description": self.clause()}}}
        return self.rng.choice(
            (
                json.dumps({"name": name, "arguments": arguments}),
                json.dumps({"type": "function", "function": {"name": name, "parameters": parameters}}),
                json.dumps({"role": "user", "content": self.sentence(), "id": f"call_{self.number()}"}),
            )
        )

    def documents(self, count: int) -> Iterator[str]:
        for _ in range(count):
            kind = self.rng.random()
            if kind < 0.75:
                yield " ".join(self.sentence() for _ in range(4))
            elif kind < 0.88:
                yield self.code()
            elif kind < 0.97:
                yield self.call() + "\n"
            else:
                yield f"{self.rng.choice(('user', 'assistant', 'system', 'tool'))}\n{self.rng.choice(OTHER_SCRIPTS)}\n"


def inflected(word: str, ending: str) -> str:
    """English spelling, well enough for a tokenizer."""
    if not ending:
        return word
    if ending == "s" and word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and ending in ("s", "ed", "ly", "ness") and word[-2] not in "aeou":
        return word[:-1] + ("ies" if ending == "s" else "i" + ending)
    if word.endswith("e") and ending in ("ed", "ing", "er", "able"):
        return word[:-1] + ending
    return word + ending


def train() -> Tokenizer:
    """The embedded tokenizer, made anew: about ten seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS) - len(LEARNED_TOKENS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(Grammar(Random(SEED)).documents(SENTENCES), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in LEARNED_TOKENS])
    return tokenizer


def settings() -> dict[str, object]:
    """What transformers needs beside tokenizer.json. The chat template is a file of its own, written by hand."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131_072,
        "clean_up_tokenization_spaces": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded tokenizer.")
    parser.add_argument("--out", type=Path, default=OUT, help="directory for tokenizer.json and tokenizer_config.json")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(settings(), indent=1) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens, {(out / 'tokenizer.json').stat().st_size} bytes in {out}")


if __name__ == "__main__":
    main()
